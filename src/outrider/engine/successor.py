"""Makes an engine that replaces a running one, with another drafter."""

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
"""Tokens decoded before an engine counts as ready: one after a prompt, one after a draft."""
TRIED_TOKENS = 8
"""Tokens decoded with a new drafter, to see that its drafts do not fail."""


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
    """Raise MemoryBudgetError if a checkpoint's weights are larger than the free memory."""
    files = [*drafter.glob("*.safetensors")] if drafter.is_dir() else [drafter]
    size, free = sum(file.stat().st_size for file in files if file.is_file()), free_memory()
    if size > free:
        raise MemoryBudgetError(
            f"{drafter} has {size} bytes of weights, but only {free} are free; give a smaller "
            "drafter, or stop other programs."
        )


class Opened(NamedTuple):
    """A drafter whose weights are loaded: the setup of an engine with it, and its ``needs``."""

    setup: EngineSetup
    needs: Needs

    @property
    def spec(self) -> DrafterSpec:
        """The drafter: the first one if the setup has several."""
        return _first(self.setup)


def opened(setup: EngineSetup, engine: Engine) -> Opened:
    """Load the drafter of a setup for the target of an engine, which may step meanwhile.

    Raises ModelError, ConfigError or MemoryBudgetError if it cannot be used.
    """
    spec = _first(setup)
    if spec.folder is not None:
        check_room(spec.folder)
    return Opened(setup, spec.needs(context_of(setup, engine.model, engine.verifier.rule)))


def _first(setup: EngineSetup) -> DrafterSpec:
    return (setup.spec.members or (setup.spec,))[0]


def successor(engine: Engine, drafter: Opened) -> Engine:
    """Return an engine with an opened drafter, which takes over the requests of ``engine``.

    Both share the loaded target. The new cache is planned as at a start, or has as many bytes as
    the old one if the user set them. The memory that the old cache uses counts as free, since a
    page takes memory only when it is first used. So while both engines exist, only the new
    drafter's weights are added. The new drafter is the default; the switch keeps its state and its
    draft length.

    Raises ModelError, ConfigError or MemoryBudgetError if the drafter cannot be used; the old
    engine is then unchanged.
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
    """Decode a few tokens with a drafter. Raises ModelError if it fails."""
    wishes = Speculation(drafter=name, num_speculative_tokens=engine.menu.max_depth)
    warm_up(engine, wishes, TRIED_TOKENS)
    why = engine.menu.switched_off.get(name)
    if why is not None:
        raise ModelError(f"drafter {name} fails when it drafts: {shown(why)}.")
