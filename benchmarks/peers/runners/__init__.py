"""One script a peer, run by the peer's own Python: they need nothing of Outrider."""
