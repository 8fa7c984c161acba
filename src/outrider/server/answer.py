"""Parts of answers: log probabilities, and figures of speculation."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

from ..base.types import Event, Logprob, Logprobs, Request
from ..frontend.outputs import OutputProcessor, SampleState
from ..sampling.logprobs import ALL
from ..text.places import places_in

LARGEST_NUMBER = 2**53
"""The largest integer that all JSON readers keep exact; larger seeds are sent as strings."""

NULLS = {
    "answer": ("service_tier", "kv_transfer_params", "ec_transfer_params"),
    "completion choice": ("token_ids", "prompt_token_ids", "prompt_logprobs", "routed_experts"),
    "chat": ("prompt_token_ids", "prompt_logprobs", "prompt_text"),
    "chat choice": ("token_ids", "routed_experts"),
    "message": (
        "refusal",
        "annotations",
        "audio",
        "function_call",
        "reasoning",
        "reasoning_content",
    ),
}
"""For each part of an answer that is not streamed, the fields that vLLM sends as null."""

MASKED = -9999.0
"""Stands for minus infinity, which JSON lacks; vLLM sends the same."""

Detail = Literal["none", "summary", "detailed"]


def nulls(*parts: str) -> dict[str, None]:
    """Return the fields of parts of an answer that are null by default."""
    return dict.fromkeys(name for part in parts for name in NULLS[part])


def speculative_decoding(sample: SampleState, longest: int, detail: Detail) -> dict[str, Any]:
    """Return vLLM's per-request figures: ratios, and a histogram of accepted tokens."""
    depths = [draft.depth for draft in sample.drafts]
    standing = [draft.accepted for draft in sample.drafts]
    steps, drafted, accepted = len(depths), sum(depths), sum(standing)
    counted = Counter(standing)
    by_length: dict[str, list[int]] = {}
    for depth, stood in zip(depths, standing, strict=True):
        by_length.setdefault(str(depth), [0] * (depth + 1))[stood] += 1
    details = {
        "per_step_accepted": standing, "per_step_drafted": depths,
        "per_step_draft_token_ids": [draft.tokens for draft in sample.drafts],
    }  # fmt: skip
    return {
        "mean_acceptance_length": 1 + accepted / steps if steps else None,
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "acceptance_histogram": [counted[i] for i in range(longest + 1)],
        "acceptance_histogram_by_draft_length": by_length,
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": longest,
        **(details if detail == "detailed" else {}),
    }


def stop_of(sample: SampleState) -> dict[str, Any]:
    """Return what ended a sample, in vLLM's field (null at EOS) and SGLang's (the id of EOS)."""
    reason, ended = sample.stop_reason, sample.finish_reason == "stop" and sample.token_ids
    matched = sample.token_ids[-1] if reason is None and ended else reason
    return {"stop_reason": reason, "matched_stop": matched}


def step_of(events: Sequence[Event], decode: Callable[[list[int]], str]) -> dict[str, Any]:
    """Return one step of one sample: its tokens with their origin, and the rejected drafts."""
    drafted = next((e.drafted for e in events if e.drafted is not None), None)
    tokens = [e for e in events if e.token_id is not None]
    rejected = drafted.tokens[drafted.accepted :] if drafted else []
    return {
        "tokens": [{"id": e.token_id, "text": e.text, "origin": e.origin} for e in tokens],
        "rejected": [{"id": id, "text": decode([id])} for id in rejected],
        "drafter": drafted.drafter if drafted else None,
    }


def finite(logprob: float) -> float:
    """Return a log probability as a finite number, which JSON can hold."""
    return max(logprob, MASKED)


class CompletionLogprobs:
    """The log probabilities of one choice of ``/v1/completions``, listed part by part.

    A token is listed when its position in the text is certain: a stop string may still cut off text
    that is held back. ``echoed`` is the prompt, if the choice's text begins with it, and ``prompt``
    has the log probabilities of its tokens. ``namer`` gives the names of tokens.
    """

    def __init__(
        self,
        outputs: OutputProcessor,
        request: Request,
        by_id: bool = False,
        echoed: str | None = None,
        prompt: Sequence[Logprobs | None] | None = None,
    ) -> None:
        self._outputs = outputs
        self._named = namer(outputs, by_id)
        self._waiting: deque[tuple[int, int, Logprobs | None]] = deque()
        if echoed is not None:
            ids = request.prompt_token_ids
            places = places_in(echoed, map(outputs.bytes_of, ids))
            self._waiting += zip(places, ids, prompt or [None] * len(ids), strict=True)
        self._place = outputs.places(request, len(echoed or ""))

    def listed(self, part: SampleState, end: int) -> dict[str, Any]:
        """Add a part of the output; return the tokens whose position is certain by now.

        The choice's text has ``end`` characters so far.
        """
        pairs = zip(part.token_ids, part.logprobs, strict=True)
        self._waiting += [(self._place(id), id, one) for id, one in pairs]
        whole, shown = part.finish_reason is not None, []
        while self._waiting and (whole or self._waiting[0][0] <= end):
            shown.append(self._waiting.popleft())
        return {
            "tokens": [self._named(id) for _, id, _ in shown],
            "token_logprobs": [finite(one[id].logprob) if one else None for _, id, one in shown],
            "top_logprobs": [self._by_word(one) if one else None for _, _, one in shown],
            "text_offset": [min(place, end) for place, _, _ in shown],
        }

    def _by_word(self, logprobs: Logprobs) -> dict[str, float]:
        """Return log probabilities by token text; repeated texts by their bytes."""
        by_word: dict[str, float] = {}
        for id, entry in logprobs.items():
            word = self._named(id)
            if word in by_word:
                escaped = "".join(f"\\x{byte:02x}" for byte in self._outputs.bytes_of(id))
                word = f"bytes:{escaped}"
            by_word.setdefault(word, finite(entry.logprob))
        return by_word


def namer(outputs: OutputProcessor, by_id: bool) -> Callable[[int], str]:
    """Return a function that names tokens: by their text or, if ``by_id``, as in ``token_id:7``."""
    return (lambda id: f"token_id:{id}") if by_id else outputs.word


def chat_logprobs(
    logprobs: Sequence[Logprobs],
    ids: Sequence[int],
    top: int,
    outputs: OutputProcessor,
    by_id: bool = False,
) -> dict[str, Any]:
    """Return log probabilities for ``/v1/chat/completions``, the ``top`` likeliest listed.

    ``namer`` gives the names of tokens.
    """
    named = namer(outputs, by_id)

    def shown(id: int, entry: Logprob) -> dict[str, Any]:
        own = list(outputs.bytes_of(id))
        return {"token": named(id), "logprob": finite(entry.logprob), "bytes": own}

    content = []
    for one, id in zip(logprobs, ids, strict=True):
        likeliest = sorted(one.items(), key=lambda pair: pair[1].rank)
        likeliest = likeliest if top == ALL else likeliest[:top]
        content.append({**shown(id, one[id]), "top_logprobs": [shown(*each) for each in likeliest]})
    return {"content": content, "refusal": None}


def prompt_logprobs(logprobs: list[Logprobs | None] | None) -> list[Any] | None:
    """Return ``prompt_logprobs`` in vLLM's form."""
    return logprobs and [
        one and {
            str(id): {"logprob": p.logprob, "rank": p.rank, "decoded_token": p.decoded_token}
            for id, p in one.items()
        }
        for one in logprobs
    ]  # fmt: skip
