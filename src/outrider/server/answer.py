"""Parts of answers: log probabilities, and figures of speculation."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

from ..outputs import SampleState
from ..types import Event, Logprob, Logprobs, Origin

LARGEST_NUMBER = 2**53
"""JSON's readers hold whole numbers up to here; larger seeds are sent as strings."""

Detail = Literal["none", "summary", "detailed"]


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
    return logprobs and [
        one and {
            str(id): {"logprob": p.logprob, "rank": p.rank, "decoded_token": p.decoded_token}
            for id, p in one.items()
        }
        for one in logprobs
    ]  # fmt: skip
