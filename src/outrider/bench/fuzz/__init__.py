"""Random and hostile traffic for a real server: ``python -m outrider.bench.fuzz``."""
