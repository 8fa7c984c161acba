"""What Outrider's plugins inside other engines share: the rule on tensors, and how it gets in.

Nothing here imports another engine. ``start`` needs the standard library alone.
"""
