"""The step in C++: rows through all layers, attention over pages, logits; torch is its reference.

The sources are in ``src``, one library for each instruction set is built from them.
"""
