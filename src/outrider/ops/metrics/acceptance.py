"""Acceptance, read from the counters of a server's ``/metrics`` around a load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import EndpointError
from .client import Client
from .engines import counts_drafts, engine_of, names_of, positions_of, source_of
from .page import Page, parse


async def scrape(client: Client) -> Page | None:
    """Return what the server's ``/metrics`` says; None if it has none."""
    try:
        answer = await client.ask("/metrics")
    except EndpointError:
        return None
    return parse(answer.body.decode("utf-8", "replace")) if answer.ok else None


def acceptance(before: Page | None, after: Page | None) -> dict[str, Any]:
    """Return the acceptance between two pages under the keys of ``vllm bench serve``.

    The rate is in percent, as there; shares by position are from 0 to 1. ``spec_decode_source``
    says whose names were read, or why there is nothing. SGLang has gauges only: the last value is
    reported, and says so.
    """
    if before is None or after is None:
        return {"spec_decode_source": "none: the server has no /metrics"}
    engine = engine_of(after)
    names = names_of(engine) if engine else {}
    if engine and counts_drafts(after, names):
        return _counted(before, after, names, source_of(engine))
    length = after.mean(names.get("acceptance_length", ""))
    if length is not None:
        return {
            "spec_decode_source": "SGLang's gauges, their last value: not of this load alone",
            "spec_decode_acceptance_length": length,
            "spec_decode_acceptance_rate": 100 * (after.mean(names.get("acceptance", "")) or 0.0),
        }
    return {"spec_decode_source": "none: /metrics tells nothing of speculation"}


def _counted(before: Page, after: Page, names: Mapping[str, str], source: str) -> dict[str, Any]:
    """Return the acceptance from counters."""

    def grown(figure: str) -> float:
        name = names.get(figure, "")
        return (after.total(name) or 0.0) - (before.total(name) or 0.0)

    drafts, drafted, accepted = grown("drafts"), grown("drafted"), grown("accepted")
    if drafted < 0 or accepted < 0:
        return {"spec_decode_source": "none: the server's counters went back; did it restart?"}
    if drafted == 0:
        return {"spec_decode_source": "none: nothing was drafted; speculation is NOT ACTIVE"}
    result: dict[str, Any] = {
        "spec_decode_source": f"counters with {source}",
        "spec_decode_acceptance_rate": 100 * accepted / drafted,
        "spec_decode_draft_tokens": int(drafted),
        "spec_decode_accepted_tokens": int(accepted),
    }
    length = after.mean(names.get("acceptance_length", ""))
    if drafts > 0:
        result["spec_decode_num_drafts"] = int(drafts)
        result["spec_decode_acceptance_length"] = 1 + accepted / drafts
        ends, starts = positions_of(after, names), positions_of(before, names)
        if ends:
            result["spec_decode_per_position_acceptance_rates"] = [
                (count - starts.get(i, 0.0)) / drafts for i, count in ends.items()
            ]
    elif length is not None:
        result["spec_decode_acceptance_length"] = length
    return result
