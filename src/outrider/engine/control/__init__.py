"""The choice of drafters and draft lengths, without torch and without an engine."""
