"""``/v1/speculation``: the drafters and their figures; the switch."""

from pathlib import Path
from typing import Any

from ..base.methods import TOGETHER
from ..base.types import Counts
from ..engine.control.switch import SpeculationState
from ..errors import ConfigError, OutriderError, WorkerError, shown
from . import beliefs
from .errors import Refusal
from .log import logger
from .metrics import RATES
from .protocol import SpeculationChange, to_refusal
from .service import Service

NOT_CHOSEN = "not_chosen"
"""Why a drafter is idle: neither the switch nor the engine has chosen it."""
LONGEST_NAME = 1024
"""Characters of the name of a drafter to load."""


def state(service: Service) -> dict[str, Any]:
    """Return the switch and the figures since the server's start, null where there are none.

    ``controller`` is what the engine believes if it chooses how to draft.
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
        "target": str(llm.inputs.folder.absolute()),
        "loading": _loading(service),
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
        "folder": llm.ready.folders.get(name) if llm.ready else None,
        "draft_length": length,
        "reason": metrics.off or (None if length else NOT_CHOSEN),
        "speedup": llm.gauges.speedups.get(name),
        **{figure: getattr(counts, figure) for figure in ("drafts", "drafted", "accepted", *RATES)},
    }


def _loading(service: Service) -> dict[str, Any] | None:
    """Return where drafters are loaded from, which one was last, and whether one is now."""
    llm, folder = service.llm, service.settings.load_drafters
    if folder is None:
        return None
    last = llm.spec.loaded
    return {
        "folder": str(folder), "loaded": last and str(last),
        "under_way": llm.loads.under_way,
    }  # fmt: skip


async def load(service: Service, body: SpeculationChange) -> None:
    """Load the drafter that a body names, and draft with it from then on.

    Raises Refusal: loading is not allowed, no drafter has that name, another one is being loaded,
    or it cannot be used. The drafter in use then stays.
    """
    llm, folder = service.llm, service.settings.load_drafters
    if folder is None:
        raise Refusal(
            "this server cannot load drafters while it runs; start it with --load-drafters DIR.",
            "load", 403,
        )  # fmt: skip
    if body.model_fields_set & {"enabled", "drafter", "num_speculative_tokens"}:
        raise Refusal("load cannot be combined with other fields; send them afterwards.", "load")
    if llm.ready is None:
        raise Refusal("the engine is starting; try again.", status=503)
    if llm.loads.under_way:
        raise Refusal("another drafter is being loaded; try again later.", "load", 409)
    place = drafter_in(folder, body.load or "")
    try:
        await llm.load_drafter(place)
    except WorkerError:
        raise
    except OutriderError as error:
        raise Refusal(str(error), "load") from None
    logger.info("the drafter is now %s", place)


def drafter_in(folder: Path, name: str) -> Path:
    """Return the file or folder of the named drafter below ``folder``, a path without links.

    Raises Refusal: there is none of that name, or a link in it leads out of ``folder``.
    """
    parts = name.split("/")
    if len(name) > LONGEST_NAME or not name.isprintable() or {"", ".", ".."} & {*parts}:
        raise Refusal(
            f"load is {shown(name)}; give the name of a drafter below the server's folder for "
            "drafters, such as adapted.", "load",
        )  # fmt: skip
    place = folder / name
    try:
        within = [place, *place.iterdir()] if place.is_dir() else [place]
        if not (place.is_dir() or place.is_file()):
            raise FileNotFoundError
        leads_out = not all(each.resolve(strict=True).is_relative_to(folder) for each in within)
    except (OSError, ValueError, RuntimeError):  # a name too long, a circle of links
        raise Refusal(
            f"there is no drafter {shown(name)} in {folder} that can be read; put it there.",
            "load", 404,
        ) from None  # fmt: skip
    if leads_out:
        raise Refusal(
            f"{shown(name)} has links that lead out of {folder}; copy the drafter there.", "load"
        )
    return place


async def change(service: Service, body: SpeculationChange) -> None:
    """Set drafter and draft length from the next step on; missing fields keep their value.

    A length of null lets the engine choose it.

    Raises Refusal: no such drafter, a length out of range, or an engine that still starts.
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
