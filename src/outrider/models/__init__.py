"""Models: the C++ step, torch, and transformers for all other families.

A checkpoint that cannot be run is a ``ModelError`` of one sentence.
"""
