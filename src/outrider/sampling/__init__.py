"""From logits to a law, and from a law to a token: noise, acceptance and their reference."""
