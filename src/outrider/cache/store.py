"""The cache of one model, as its owners see it."""


class Store:
    """The cache of one model."""

    page_size: int

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy the entries at slots ``sources`` to slots ``targets``, in every layer."""
        raise RuntimeError("this model's cache cannot be rearranged; draft chains only")

    def release(self, key: str) -> None:
        """Forget what is kept by ``Segment.key``; pages are given back by their owner."""
