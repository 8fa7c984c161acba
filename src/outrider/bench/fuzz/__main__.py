"""``python -m outrider.bench.fuzz``."""

from .run import main

main()
