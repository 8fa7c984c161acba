"""Benchmarks of the whole: ``python -m benchmarks`` lists them."""
