"""Parts of answers: usage, log probabilities, and figures of speculation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

from ..outputs import RequestState, SampleState
from ..types import Event, Logprob, Logprobs, Origin, Request, Speculation

LARGEST_NUMBER = 2**53
"""JSON's readers hold whole numbers up to here; larger seeds are sent as strings."""

Detail = Literal["none", "summary", "detailed"]


def seed_of(request: Request) -> int | str:
    """Return the seed that repeats a request, a string where JSON's readers would round it."""
    return request.seed if request.seed <= LARGEST_NUMBER else str(request.seed)


def drafts_prediction(speculation: Speculation) -> bool:
    """Return whether the drafts of a request come from its prediction."""
    by = speculation.drafter in (None, "prediction")
    return speculation.enabled and by and bool(speculation.prediction)


def usage(states: Sequence[RequestState]) -> dict[str, Any]:
    """Return OpenAI's ``usage`` of a call; output tokens are those that were emitted."""
    prompt = sum(len(r.request.prompt_token_ids) for r in states)
    output = sum(len(s.token_ids) for r in states for s in r.samples)
    predicted = [r.counts for r in states if drafts_prediction(r.request.speculation)]
    accepted = sum(c.accepted for c in predicted)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(r.cached_tokens for r in states)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(c.drafted for c in predicted) - accepted,
        },
    }


def metrics(states: Sequence[RequestState], longest: int, detail: Detail) -> dict[str, Any]:
    """Return TTFT, and speculation in vLLM's names, null unless the call has one sample."""
    firsts = [r.ttft for r in states if r.ttft is not None]
    samples = [s for r in states for s in r.samples]
    shown = None
    if len(samples) == 1 and detail != "none":
        shown = speculative_decoding(samples[0], longest, detail)
    return {
        "time_to_first_token_ms": 1000 * min(firsts) if firsts else None,
        "speculative_decoding": shown,
    }


def speculative_decoding(sample: SampleState, longest: int, detail: Detail) -> dict[str, Any]:
    """Return vLLM's per-request figures: ratios, and a histogram of accepted tokens."""
    depths = [draft.depth for draft in sample.drafts]
    steps, drafted, accepted = len(depths), sum(depths), sum(sample.accepted)
    counted = Counter(sample.accepted)
    by_length: dict[str, list[int]] = {}
    for depth, stood in zip(depths, sample.accepted, strict=True):
        by_length.setdefault(str(depth), [0] * (depth + 1))[stood] += 1
    figures: dict[str, Any] = {
        "mean_acceptance_length": 1 + accepted / steps if steps else None,
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "acceptance_histogram": [counted[i] for i in range(longest + 1)],
        "acceptance_histogram_by_draft_length": by_length,
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": longest,
    }
    if detail == "detailed":
        figures["per_step_accepted"] = sample.accepted
        figures["per_step_drafted"] = depths
        figures["per_step_draft_token_ids"] = [draft.tokens for draft in sample.drafts]
    return figures


def step_of(events: Sequence[Event], decode: Callable[[list[int]], str]) -> dict[str, Any]:
    """Return one step of one sample: its tokens with their origin, and the rejected drafts."""
    drafted = next((e.drafted for e in events if e.drafted is not None), None)
    tokens = [e for e in events if e.token_id is not None]
    stood = sum(e.origin is Origin.ACCEPTED for e in tokens)
    rejected = drafted.tokens[stood:] if drafted else []
    return {
        "tokens": [{"id": e.token_id, "text": e.text, "origin": e.origin} for e in tokens],
        "rejected": [{"id": id, "text": decode([id])} for id in rejected],
        "drafter": drafted.drafter if drafted else None,
    }


def completion_logprobs(
    logprobs: Sequence[Logprobs | None],
    ids: Sequence[int],
    offset: int,
    decode: Callable[[list[int]], str],
) -> dict[str, Any]:
    """Return log probabilities for ``/v1/completions``; the text begins at ``offset``.

    The first token of a prompt has no log probability: ``decode`` gives its text.
    """
    tokens, values, tops, offsets = [], [], [], []
    for one, id in zip(logprobs, ids, strict=True):
        own = one[id] if one else None
        word = own.decoded_token or "" if own else decode([id])
        tokens.append(word)
        values.append(own.logprob if own else None)
        tops.append({p.decoded_token or "": p.logprob for p in one.values()} if one else None)
        offsets.append(offset)
        offset += len(word)
    return {
        "tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets,
    }  # fmt: skip


def chat_logprobs(logprobs: Sequence[Logprobs], ids: Sequence[int], top: int) -> dict[str, Any]:
    """Return log probabilities for ``/v1/chat/completions``, the ``top`` likeliest listed."""
    content = []
    for one, id in zip(logprobs, ids, strict=True):
        likeliest = sorted(one.values(), key=lambda p: p.rank)[:top]
        content.append({**_shown(one[id]), "top_logprobs": [_shown(p) for p in likeliest]})
    return {"content": content, "refusal": None}


def _shown(entry: Logprob) -> dict[str, Any]:
    token = entry.decoded_token or ""
    return {"token": token, "logprob": entry.logprob, "bytes": list(token.encode())}


def prompt_logprobs(logprobs: list[Logprobs | None] | None) -> list[Any] | None:
    """Return ``prompt_logprobs`` in vLLM's form."""
    if logprobs is None:
        return None
    return [
        one and {
            str(id): {"logprob": p.logprob, "rank": p.rank, "decoded_token": p.decoded_token}
            for id, p in one.items()
        }
        for one in logprobs
    ]  # fmt: skip
