"""Training: the corpus, and the loops that train targets and drafters."""
