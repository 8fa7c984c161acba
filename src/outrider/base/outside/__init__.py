"""Readers of untrusted data: texts, documents and answers over HTTP, each bounded.

Each failure is one OutriderError: what is wrong, where, what to do. Of Outrider, this package
imports only errors and limits.
"""
