"""Readers of untrusted data: texts, documents and answers over HTTP, each bounded.

Each failure is one OutriderError: what is wrong, where, what to do. This package imports nothing of
Outrider's but errors and limits.
"""
