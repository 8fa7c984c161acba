"""Checks that speculative decoding emits the target's output, and shows how a step does."""
