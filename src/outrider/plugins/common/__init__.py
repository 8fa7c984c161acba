"""The common part of the plugins inside other engines: the rule on tensors, and how it gets in.

Nothing here imports another engine. ``start`` needs the standard library alone.
"""
