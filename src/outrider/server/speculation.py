"""``/v1/speculation``: the drafters and their figures; the switch."""

from typing import Any

from ..base.methods import TOGETHER
from ..base.types import Counts
from ..engine.control.switch import SpeculationState
from ..errors import ConfigError
from . import beliefs
from .errors import Refusal
from .metrics import RATES
from .protocol import SpeculationChange, to_refusal
from .service import Service

NOT_CHOSEN = "not_chosen"
"""The reason of a drafter that neither the switch nor the engine has chosen."""


def state(service: Service) -> dict[str, Any]:
    """Return the switch and the figures since the server's start, null where there are none.

    ``controller`` is what the engine believes where it chooses how to draft.
    """
    llm, metrics, recorder = service.llm, service.metrics, service.recorder
    now, ready = llm.speculation, llm.ready
    names, drafts, chosen = ready.drafters if ready else (), metrics.draft_length, metrics.chosen
    return {
        "enabled": now.enabled if now else None,
        "drafter": now.drafter if now else None,
        "num_speculative_tokens": now.num_speculative_tokens if now else None,
        "max_num_speculative_tokens": ready.max_draft if ready else None,
        "draft_length": drafts,
        "reason": metrics.off or (None if drafts or chosen is None else beliefs.why_not(chosen)),
        "drafters": {name: _drafter(service, name) for name in names if name != "none"},
        "controller": llm.beliefs,
        "recording": recorder and {"folder": str(recorder.how.folder), **recorder.state()},
    }


def _drafter(service: Service, name: str) -> dict[str, Any]:
    """Return one drafter's draft length K, or why that is 0, and its counts."""
    llm, metrics = service.llm, service.metrics
    counts = metrics.by_drafter.get(name, Counts())
    if metrics.chosen is not None:
        length = beliefs.longest(metrics.chosen, name)
    else:
        named = llm.speculation is not None and name in llm.speculation.drafter.split(TOGETHER)
        length = metrics.draft_length if named else 0
    return {
        "draft_length": length,
        "reason": metrics.off or (None if length else NOT_CHOSEN),
        "speedup": llm.gauges.speedups.get(name),
        **{figure: getattr(counts, figure) for figure in ("drafts", "drafted", "accepted", *RATES)},
    }


async def change(service: Service, body: SpeculationChange) -> None:
    """Set drafter and draft length from the next step on; missing fields keep their value.

    A length of null leaves it to the engine.

    Raises Refusal: there is no such drafter, the length is out of range, or the engine starts.
    """
    now = service.llm.speculation
    if now is None or service.llm.ready is None:
        raise Refusal("the engine is starting; try again.", status=503)
    given = "num_speculative_tokens" in body.model_fields_set
    wanted = SpeculationState(
        now.enabled if body.enabled is None else body.enabled,
        body.drafter or now.drafter,
        body.num_speculative_tokens if given else now.num_speculative_tokens,
    )
    try:
        await service.llm.set_speculation(wanted)
    except ConfigError as error:
        raise to_refusal(error) from None
