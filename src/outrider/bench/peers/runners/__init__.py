"""One script a peer, run by the peer's own Python: standard library and the peer's packages only."""
