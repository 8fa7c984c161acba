"""Several drafters side by side: each sequence has its own, and may change it between steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..errors import ConfigError, shown
from ..sampling.draws import Noise
from ..types import Draft, Request, Scheduled, Verdict
from .base import Drafter


class Switch:
    """Drafts for each sequence with the drafter that its request names, else with the default.

    Nothing that a drafter says changes the output, so neither does the choice among them. For the
    coupled rule alone: drafts carry no laws.

    Args:
        drafters: by name; chains only.
        default: one of the names, may be set anew between steps.
    """

    target_layers: tuple[int, ...] = ()

    def __init__(self, drafters: Mapping[str, Drafter], default: str) -> None:
        self.drafters = dict(drafters)
        self.default = default
        self.max_length = self.max_nodes = max(d.max_length for d in drafters.values())

    @property
    def name(self) -> str:
        """The default's name."""
        return self.default

    def of(self, request: Request) -> str:
        """The name of the drafter of a request.

        Raises:
            ConfigError: there is none of the name that it gives.
        """
        wanted = request.speculation.drafter
        if wanted is None:
            return "prediction" if request.speculation.prediction else self.default
        if wanted not in self.drafters:
            known = ", ".join(sorted(self.drafters))
            raise ConfigError(f"there is no drafter {shown(wanted)} here; give one of {known}.")
        return wanted

    def propose(self, batch: Sequence[Scheduled], lengths: Sequence[int], noise: Noise) -> Draft:
        names = [self.of(item.sequence.request) for item in batch]
        tokens: list[list[int]] = [[] for _ in batch]
        for name in dict.fromkeys(names):
            drafter = self.drafters[name]
            mine = [i for i, other in enumerate(names) if other == name]
            most = drafter.max_length
            found = drafter.propose(
                [batch[i] for i in mine], [min(lengths[i], most) for i in mine], noise
            )
            for i, draft in zip(mine, found.tokens, strict=True):
                tokens[i] = draft
        return Draft.chains(tokens)._replace(drafters=names)

    def observe(self, batch: Sequence[Scheduled], verdict: Verdict) -> None:
        for drafter in self.drafters.values():
            drafter.observe(batch, verdict)

    def release(self, seq_id: str) -> None:
        for drafter in self.drafters.values():
            drafter.release(seq_id)
