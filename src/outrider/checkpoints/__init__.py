"""Checkpoints in files: reads and writes them, and runs nothing."""
