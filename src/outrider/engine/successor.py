"""Makes the engine that goes on in the place of another, with another drafter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ..base.config import free_memory
from ..base.methods import NONE
from ..base.types import DEFAULT_SPECULATION, Request, SamplingParams, Speculation
from ..drafters.base import DrafterSpec, Needs
from ..errors import MemoryBudgetError, ModelError, shown
from .build import build_engine, context_of
from .engine import Engine
from .setup import EngineSetup

WARM_TOKENS = 2
"""Decoded before an engine counts as ready: after a prompt, after a draft."""
TRIED_TOKENS = 8
"""Decoded with a new drafter, whose drafts must not fail."""


def warm_up(
    engine: Engine, speculation: Speculation = DEFAULT_SPECULATION, tokens: int = WARM_TOKENS
) -> None:
    """Decode a few tokens, so that the first request meets warm caches."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    shortest = min(engine.max_model_len - 1, 8)
    prompt = (0,) * max(1, shortest - tokens)
    engine.add(Request("warm-up", prompt, params, 0, speculation=speculation))
    while engine.has_work:
        engine.step()
    engine.settle()


def check_room(drafter: Path) -> None:
    """Raise MemoryBudgetError where the weights of a checkpoint are larger than what is free."""
    files = [*drafter.glob("*.safetensors")] if drafter.is_dir() else [drafter]
    size, free = sum(file.stat().st_size for file in files if file.is_file()), free_memory()
    if size > free:
        raise MemoryBudgetError(
            f"{drafter} has {size} bytes of weights, but only {free} are free; give a smaller "
            "drafter, or stop other programs."
        )


class Opened(NamedTuple):
    """A drafter whose weights are read: the parts of an engine with it, and its ``needs``."""

    setup: EngineSetup
    needs: Needs

    @property
    def spec(self) -> DrafterSpec:
        """The drafter, which stands first where there are several."""
        return _first(self.setup)


def opened(setup: EngineSetup, engine: Engine) -> Opened:
    """Return the drafter of a setup for the target of an engine, which may go on meanwhile.

    Raises ModelError, ConfigError, MemoryBudgetError: it cannot be used.
    """
    spec = _first(setup)
    if spec.folder is not None:
        check_room(spec.folder)
    return Opened(setup, spec.needs(context_of(setup, engine.model, engine.verifier.rule)))


def _first(setup: EngineSetup) -> DrafterSpec:
    return (setup.spec.members or (setup.spec,))[0]


def successor(engine: Engine, drafter: Opened) -> Engine:
    """Return an engine with a drafter that was opened, which goes on with another's requests.

    Both have the same target, loaded once. The new cache is planned as at a start, or has the bytes
    of the old one where the user said how many; what the old one holds counts as free, since a page
    takes memory when it is first used. So while both engines are there, only the new drafter's
    weights come on top. Its default is the new drafter; the switch stays on or off, and at its
    draft length.

    Raises ModelError, ConfigError, MemoryBudgetError: the drafter cannot be used; the old engine
    goes on as if nothing had happened.
    """
    setup, name = drafter.setup, drafter.spec.name
    budget, pool = engine.budget, engine.scheduler.pool
    memory = budget.target_bytes + budget.drafter_bytes
    held = memory // budget.pages * (pool.num_usable - pool.num_blank)
    if setup.config.memory is not None:
        setup = replace(setup, config=replace(setup.config, memory=memory))
    rule, known = engine.verifier.rule, {name: drafter.needs}
    made = build_engine(setup, model=engine.model, rule=rule, known=known, freed=held)
    _try(made, name)
    state, now = made.menu.state, engine.menu.state
    off = not now.enabled and now.drafter != NONE
    state = replace(state, num_speculative_tokens=now.num_speculative_tokens)
    if off or state != made.menu.state:
        made.menu.set(replace(state, enabled=not off))
    made.take_over(engine)
    return made


def _try(engine: Engine, name: str) -> None:
    """Have a drafter draft for a few tokens. Raises ModelError: it fails."""
    wishes = Speculation(drafter=name, num_speculative_tokens=engine.menu.max_depth)
    warm_up(engine, wishes, TRIED_TOKENS)
    why = engine.menu.switched_off.get(name)
    if why is not None:
        raise ModelError(f"drafter {name} fails when it drafts: {shown(why)}.")
