"""Text: from messages and tokens, and back."""
