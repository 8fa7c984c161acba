"""Outrider's rule inside SGLang: see docs/sglang.md. Nothing here imports SGLang."""
