"""Checkpoints in files: reads and writes them, and runs nothing.

Whatever is missing, damaged or not supported is a ``ModelError`` of one sentence.
"""
