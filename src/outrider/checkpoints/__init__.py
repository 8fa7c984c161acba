"""Reads and writes the files of checkpoints; runs nothing.

Anything missing, damaged or not supported is a ``ModelError`` of one sentence.
"""
