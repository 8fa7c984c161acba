"""Acceptance under the keys of ``vllm bench serve``, from pages of metrics around a load."""

from __future__ import annotations

from typing import Any

from ...base.engines import BY_NAME
from ...base.outside.stamped import Client
from ...errors import EndpointError
from .figures import Figures
from .page import Page, parse


async def scrape(client: Client) -> Page | None:
    """Return the page of the server's ``/metrics``; None if it has none."""
    try:
        answer = await client.ask("/metrics")
    except EndpointError:
        return None
    return parse(answer.body.decode("utf-8", "replace")) if answer.ok else None


def acceptance(before: Page | None, after: Page | None) -> dict[str, Any]:
    """Return the acceptance between two pages under the keys of ``vllm bench serve``.

    The rate is in percent, as in vLLM; shares by position are from 0 to 1. ``spec_decode_source``
    says which engine's names were read, or why there is no result. SGLang has gauges only: the last
    value is reported, and ``spec_decode_source`` says so.
    """
    if before is None or after is None:
        return {"spec_decode_source": "none: the server has no /metrics"}
    load = Figures.of(after, before)
    if load is not None and load.total("drafted") is not None:
        names = [load.names.get(figure, "") for figure in ("drafted", "accepted")]
        if any((before.total(name) or 0) > (after.total(name) or 0) for name in names):
            why = "none: the server's counters went back; did it restart?"
            return {"spec_decode_source": why}
        return _counted(load)
    length = load and load.mean("acceptance_length")
    if load is None or length is None:
        return {"spec_decode_source": "none: /metrics tells nothing of speculation"}
    return {
        "spec_decode_source": "SGLang's gauges, their last value: not of this load alone",
        "spec_decode_acceptance_length": length,
        "spec_decode_acceptance_rate": 100 * (load.mean("acceptance") or 0.0),
    }


def _counted(load: Figures) -> dict[str, Any]:
    """Return the acceptance from counters."""
    drafts, drafted, accepted = (load.total(x) or 0.0 for x in ("drafts", "drafted", "accepted"))
    if drafted == 0:
        return {"spec_decode_source": "none: nothing was drafted; speculation is NOT ACTIVE"}
    whose = "vLLM" if load.engine == "outrider" else BY_NAME[load.engine].title
    result: dict[str, Any] = {
        "spec_decode_source": f"counters with {whose}'s names",
        "spec_decode_acceptance_rate": 100 * accepted / drafted,
        "spec_decode_draft_tokens": int(drafted),
        "spec_decode_accepted_tokens": int(accepted),
    }
    if drafts > 0:
        result["spec_decode_num_drafts"] = int(drafts)
    if load.acceptance_length is not None:
        result["spec_decode_acceptance_length"] = load.acceptance_length
    if survival := load.survival():
        result["spec_decode_per_position_acceptance_rates"] = survival
    return result
