"""Readers of what comes from outside: texts, documents and answers over HTTP, each bounded.

    from ..outside.text import printable
    from ..outside.documents import parse_json, read_json, parse_yaml, read_yaml, read_toml
    from ..outside.http import address, call

Nothing here believes its input. Each failure is one OutriderError: what is wrong, where, what to
do. Nothing here knows the other rooms, but for errors and limits.
"""
