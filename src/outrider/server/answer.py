"""One generation as clients see it: choices, usage, and what speculation did for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

from ..outputs import Pending, Sample
from ..types import Event, Logprob, Logprobs, Origin, Request, Speculation

LARGEST_NUMBER = 2**53
"""JSON's readers hold whole numbers up to here; larger seeds are sent as strings."""

Detail = Literal["none", "summary", "detailed"]


def seed_of(request: Request) -> int | str:
    """The seed that repeats a request, exact in any reader."""
    return request.seed if request.seed <= LARGEST_NUMBER else str(request.seed)


def drafts_prediction(wanted: Speculation) -> bool:
    """Whether what was drafted for a request is of its prediction."""
    by = wanted.drafter in (None, "prediction")
    return wanted.enabled and by and bool(wanted.prediction)


def usage(answers: Sequence[Pending]) -> dict[str, Any]:
    """OpenAI's ``usage`` of a call; output tokens are those that were emitted."""
    prompt = sum(len(a.request.prompt_token_ids) for a in answers)
    output = sum(len(s.token_ids) for a in answers for s in a.samples)
    predicted = [a.counts for a in answers if drafts_prediction(a.request.speculation)]
    accepted = sum(c.accepted for c in predicted)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(a.cached_tokens for a in answers)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(c.drafted for c in predicted) - accepted,
        },
    }


def metrics(answers: Sequence[Pending], longest: int, detail: Detail) -> dict[str, Any]:
    """TTFT, and speculation in vLLM's names; null unless the call has but one sample."""
    firsts = [a.ttft for a in answers if a.ttft is not None]
    samples = [s for a in answers for s in a.samples]
    shown = None
    if len(samples) == 1 and detail != "none":
        shown = speculative_decoding(samples[0], longest, detail)
    return {
        "time_to_first_token_ms": 1000 * min(firsts) if firsts else None,
        "speculative_decoding": shown,
    }


def speculative_decoding(sample: Sample, longest: int, detail: Detail) -> dict[str, Any]:
    """vLLM's per-request figures: ratios, and how often so many drafted tokens were accepted."""
    depths = [draft.depth for draft in sample.drafts]
    steps, drafted, accepted = len(depths), sum(depths), sum(sample.accepted)
    counted = Counter(sample.accepted)
    by_length: dict[str, list[int]] = {}
    for depth, stood in zip(depths, sample.accepted, strict=True):
        by_length.setdefault(str(depth), [0] * (depth + 1))[stood] += 1
    found: dict[str, Any] = {
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
        found["per_step_accepted"] = sample.accepted
        found["per_step_drafted"] = depths
        found["per_step_draft_token_ids"] = [draft.tokens for draft in sample.drafts]
    return found


def step_of(events: Sequence[Event], decode: Callable[[list[int]], str]) -> dict[str, Any]:
    """One step of one sample: its tokens with their origin, and what was drafted in vain."""
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
    found: Sequence[Logprobs | None],
    ids: Sequence[int],
    offset: int,
    decode: Callable[[list[int]], str],
) -> dict[str, Any]:
    """The form of ``/v1/completions``; ``offset`` is where the first token's text begins.

    Nothing is known of a prompt's first token but its text, which ``decode`` gives.
    """
    tokens, values, tops, offsets = [], [], [], []
    for one, id in zip(found, ids, strict=True):
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


def chat_logprobs(found: Sequence[Logprobs], ids: Sequence[int], top: int) -> dict[str, Any]:
    """The form of ``/v1/chat/completions``; ``top`` of the likeliest tokens are listed."""
    content = []
    for one, id in zip(found, ids, strict=True):
        likeliest = sorted(one.values(), key=lambda p: p.rank)[:top]
        content.append({**_shown(one[id]), "top_logprobs": [_shown(p) for p in likeliest]})
    return {"content": content, "refusal": None}


def _shown(found: Logprob) -> dict[str, Any]:
    token = found.decoded_token or ""
    return {"token": token, "logprob": found.logprob, "bytes": list(token.encode())}


def prompt_logprobs(found: list[Logprobs | None] | None) -> list[Any] | None:
    """vLLM's form of ``prompt_logprobs``."""
    if found is None:
        return None
    return [
        one and {
            str(id): {"logprob": p.logprob, "rank": p.rank, "decoded_token": p.decoded_token}
            for id, p in one.items()
        }
        for one in found
    ]  # fmt: skip
