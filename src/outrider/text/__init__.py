"""Text: from messages and tokens, and back.

What a user's text or messages cannot be is a ``RequestError`` of one sentence.
"""
