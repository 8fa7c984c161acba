"""Readers of untrusted data: texts, documents and answers over HTTP, each bounded.

    from ..outside.text import printable
    from ..outside.documents import parse_json, read_json, parse_yaml, read_toml
    from ..outside.http import address, call

Nothing here trusts its input. Each failure is one OutriderError: what is wrong, where, what to do.
This package imports nothing of Outrider's but errors and limits.
"""
