"""Formats of quantised checkpoints, one module each."""
