"""Checks that speculative decoding emits the target's output, and explains single steps."""
