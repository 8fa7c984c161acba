"""The switch of speculation, and what it and each request fix or leave open."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ...base.methods import AUTO, NONE, PREDICTION, TOGETHER
from ...base.types import DEFAULT_SPECULATION, NO_DRAFT, DraftBudget, SequenceState, Speculation
from ...errors import ConfigError, shown
from .choices import PLAIN, Choice, DrafterView, Freedom, Method
from .tuning import USUAL, Tuning


@dataclass(frozen=True)
class SpeculationState:
    """The switch: on or off, the default drafter, and the draft length.

    If the length is None, the engine chooses it. For ``auto`` the length is a limit, and the engine
    chooses drafter and length at each step. For another drafter the length is fixed.
    """

    enabled: bool
    drafter: str
    num_speculative_tokens: int | None


class Menu:
    """The wishes of the switch and of requests, among the drafters that have not failed.

    Drafts of ``together`` may be merged. ``auto`` chooses among the ``portfolio`` and a request's
    prediction. The engine chooses among ``methods``; None if it chooses nothing. With ``chains`` no
    trees are drafted.
    """

    def __init__(
        self,
        drafters: Mapping[str, DrafterView],
        state: SpeculationState,
        max_depth: int,
        together: Sequence[tuple[str, ...]] = (),
        portfolio: Sequence[str] = (),
        methods: Mapping[str, Method] | None = None,
        chains: bool = False,
        tuning: Tuning = USUAL,
    ) -> None:
        self.drafters, self.state, self.max_depth = drafters, state, max_depth
        auto = () if methods is None else (AUTO,)
        self.names = (*drafters, *map(TOGETHER.join, together), *auto)
        """The names that a request or the switch may call for."""
        self.portfolio = (*portfolio, PREDICTION)
        self.switched_off: dict[str, str] = {}  # drafters that failed, and why
        self.enabled = True  # the default ``none`` shows as off, but requests may still draft
        self.version = 0  # changes with what is asked for
        self._methods, self._chains, self._most = methods or {}, chains, tuning.max_freedoms
        self.refresh()

    def refresh(self) -> None:
        """Forget what was derived, since the switch has changed or a drafter has failed."""
        self.version += 1
        self._freedoms: dict[Speculation, Freedom] = {}
        self._usual = self._fixed(DEFAULT_SPECULATION)

    @property
    def default(self) -> str:
        """The drafter of requests that name none; under ``auto`` the first that there is."""
        return (self.portfolio if self.state.drafter == AUTO else parts(self.state.drafter))[0]

    def set(self, state: SpeculationState) -> None:
        """Draft in another way from the next step on; raises as ``check_choice`` does."""
        check_choice(state, self.names, self.max_depth)
        self.state, self.enabled = state, state.enabled
        self.refresh()

    def check(self, wishes: Speculation) -> None:
        """Raise ConfigError if a request names an unknown drafter or too great a length."""
        self._name(wishes)
        wanted = wishes.num_speculative_tokens or 0
        if wanted > self.max_depth:
            raise ConfigError(
                f"num_speculative_tokens is {wanted}, but this engine drafts {self.max_depth} "
                "tokens at most; give that or less."
            )

    def _name(self, wishes: Speculation) -> str:
        """Return the name of the drafter of a request; ConfigError if it is unknown."""
        if wishes.drafter is not None:
            check_known(wishes.drafter, self.names)
            return wishes.drafter
        default = self.state.drafter
        predicts = wishes.prediction and PREDICTION in self.drafters
        return PREDICTION if predicts and default != AUTO else default

    def freedom(self, wishes: Speculation) -> Freedom:
        """Return what a request leaves to the engine."""
        freedom = self._freedoms.get(wishes)
        if freedom is None:
            if len(self._freedoms) > self._most:
                self._freedoms.clear()
            freedom = self._freedoms[wishes] = self._left_free(wishes)
        return freedom

    def _left_free(self, wishes: Speculation) -> Freedom:
        name, length = self._name(wishes), wishes.num_speculative_tokens
        if length is None and (wishes.drafter is None or name == AUTO):
            length = self.state.num_speculative_tokens
        max_depth = self.max_depth if length is None else min(length, self.max_depth)
        methods = self._methods
        if not wishes.enabled or not max_depth:
            return Freedom((), 0, PLAIN)
        if name != AUTO and length is not None:
            depth = min(max_depth, methods[name].max_depth) if name in methods else 0
            return Freedom((), max_depth, Choice(name, depth) if depth else PLAIN)
        allowed = [
            each
            for each, method in methods.items()
            if self.switched_off.keys().isdisjoint(method.drafters)
            and (PREDICTION not in method.drafters or wishes.prediction)
            and (
                {*method.drafters} <= {*self.portfolio} and not method.merges
                if name == AUTO
                else [*method.drafters] == parts(name) and not method.otherwise
            )
        ]
        return Freedom(tuple(allowed), max_depth)

    def fixed(self, sequence: SequenceState) -> tuple[str, DraftBudget]:
        """Return the drafter of a sequence and its budget, where the engine does not choose."""
        return self._fixed(sequence.request.speculation) if sequence.has_wishes else self._usual

    def _fixed(self, wishes: Speculation) -> tuple[str, DraftBudget]:
        name = self._name(wishes)
        drafters = [self.drafters[part] for part in parts(name) if part in self.drafters]
        if not self.enabled or not drafters or self.switched_off.keys() & {*parts(name)}:
            return (NONE if name == AUTO else name), NO_DRAFT
        most = self.state.num_speculative_tokens or self.max_depth
        depth = wishes.length(min([most, *(each.max_length for each in drafters)]))
        branches = len(drafters) == 1 and drafters[0].max_nodes > drafters[0].max_length
        trees = depth and branches and not self._chains
        nodes = drafters[0].max_nodes if trees else depth * len(drafters)
        return name, DraftBudget(depth, nodes)


def parts(name: str) -> list[str]:
    """Return the drafters in a name that joins several."""
    return name.split(TOGETHER)


def check_known(name: str, names: Collection[str]) -> None:
    """Raise ConfigError if a drafter's name is not among ``names``."""
    if name not in names:
        known = ", ".join(sorted(names))
        raise ConfigError(f"there is no drafter {shown(name)} here; give one of {known}.")


def check_choice(state: SpeculationState, names: Collection[str], max_depth: int) -> None:
    """Raise ConfigError for an unknown default, or a length that is not 1 to ``max_depth``."""
    check_known(state.drafter, names)
    length = state.num_speculative_tokens
    if length is not None and not 1 <= length <= max_depth:
        raise ConfigError(f"num_speculative_tokens is {length}; give 1 to {max_depth}.")
