"""Looking whether what was generated is what the target says."""
