"""A controller beside a speculative engine: it reduces drafting, or moves traffic to a standby.

It runs in a process of its own and imports no torch. ``decide`` holds the rules, without any I/O;
``sources`` read figures, ``switches`` change things, ``loop`` joins them.
"""
