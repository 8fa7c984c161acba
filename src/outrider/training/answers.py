"""Lets the target answer prompts, speculatively and in batches; keeps its answers as samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from time import monotonic
from typing import Any

import numpy as np

from ..base.types import SamplingParams
from ..bench.workload import Item
from ..errors import ConfigError, RequestError
from ..llm import LLM
from ..text.codec import TextCodec
from .samples import DataFolder, Sample
from .states import States, StateTap

BLOCK, FIRST_BLOCK = 256, 64
"""Number of prompts in a shard, and in the first shard if time is limited."""
TURNS = 64
"""Most answers in a conversation."""


@dataclass
class Dialogue:
    """A prompt that the target answers, turn by turn if the user speaks more than once.

    ``waiting`` are the users' later messages, ``tokens`` and ``said`` the sample so far, and
    ``states`` the target's along it, if they are kept.
    """

    number: int
    item: Item
    history: list[dict[str, Any]] = field(default_factory=list)
    waiting: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    said: list[bool] = field(default_factory=list)
    states: States | None = None

    def __post_init__(self) -> None:
        # Answers by others are left out: the target gives its own.
        self.waiting = [m for m in self.item.messages if m["role"] != "assistant"]

    def ask(self, codec: TextCodec) -> list[int] | None:
        """Return the next prompt's ids, None if the dialogue is over."""
        if not self.item.messages:
            return None if self.tokens else codec.encode(self.item.prompt)
        if not self.waiting:
            return None
        while self.waiting:
            self.history.append(self.waiting.pop(0))
            if self.history[-1]["role"] == "user":
                break
        return codec.chat(self.history)

    def answer(
        self, asked: Sequence[int], ids: Sequence[int], text: str, states: States | None = None
    ) -> Sample | None:
        """Add an answer; return the sample so far if the prompt ``asked`` does not continue it.

        ``states`` are those of the prompt and the answer.
        """
        self.history.append({"role": "assistant", "content": text})
        begun = len(self.tokens)
        done = None
        if self.tokens != [*asked[:begun]]:  # the template writes earlier turns differently
            done, begun = self.sample(), 0
            self.tokens, self.said = [], []
        self.tokens += [*asked[begun:], *ids]
        self.said += [False] * (len(asked) - begun) + [True] * len(ids)
        self.states = states
        return done

    def sample(self) -> Sample:
        """Return the dialogue so far as a sample."""
        tokens, said = np.array(self.tokens, np.int32), np.array(self.said, np.bool_)
        return Sample(tokens, said, self.number, self.states)


def write_answers(
    llm: LLM,
    items: Sequence[Item],
    data: DataFolder,
    skip: bool,
    told: Callable[[int], None],
    tap: StateTap | None = None,
    until: float = inf,
) -> int:
    """Let the target answer the missing prompts; return how many prompts were left out.

    Seeds follow from the prompts' numbers, so that samples depend on nothing else. ``told`` is
    called with the number of finished prompts. Samples get the states that a ``tap`` has. A
    conversation ends at the end of the context. A block of prompts is not begun if, taking as long
    as the one before, it would end after the monotonic clock reaches ``until``.

    Raises ConfigError: a prompt is longer than the context, or the template refuses it; with
    ``skip`` it is left out.
    """
    left_out, block, begin = 0, BLOCK if until == inf else FIRST_BLOCK, monotonic()
    while data.done < len(items) and block:
        first, stop = data.done, min(data.done + block, len(items))
        dialogues = everyone = [Dialogue(n, items[n]) for n in range(first, stop)]
        samples: list[Sample] = []
        for turn in range(TURNS):
            asked = [*_asked(llm, dialogues, data, skip)]
            left_out += len(dialogues) - len(asked) if not turn else 0
            dialogues = [each for each, _ in asked]
            if not asked:
                break
            params = [_params(data, each.number, turn, len(ids)) for each, ids in asked]
            outputs = llm.generate([ids for _, ids in asked], params)
            for (each, ids), output in zip(asked, outputs, strict=True):
                answer = output.outputs[0]
                count = len(ids) + len(answer.token_ids)
                states = None if tap is None else tap.take(output.request_id, count)
                done = each.answer(ids, answer.token_ids, answer.text, states)
                if done is not None:
                    samples.append(done)
                if not answer.token_ids or answer.finish_reason != "stop":
                    each.waiting.clear()
        samples += [each.sample() for each in everyone if each.tokens]
        data.add(sorted(samples, key=lambda sample: sample.prompt), first, stop)
        told(data.done)
        if until < inf:
            now = monotonic()
            block = max(0, min(BLOCK, int((until - now) / (now - begin) * (stop - first))))
            begin = now
    return left_out


def _asked(
    llm: LLM, dialogues: Sequence[Dialogue], data: DataFolder, skip: bool
) -> Iterator[tuple[Dialogue, list[int]]]:
    """Yield each dialogue that is not over, with its next prompt's ids; ``skip`` bad prompts."""
    codec = llm.inputs.codec
    if codec is None:
        raise ConfigError("the target has no tokenizer, so it cannot answer prompts; give another.")
    for each in dialogues:
        try:
            ids = each.ask(codec) or []
            if not ids and not each.tokens:
                raise RequestError("nothing in it asks for an answer")
            if len(ids) >= data.about.context:
                raise RequestError(
                    f"it has {len(ids)} tokens, and the context is {data.about.context}"
                )
        except RequestError as error:
            if not (skip or each.tokens):
                what = str(error).rstrip(".")
                raise ConfigError(
                    f"prompt {each.number + 1} cannot be answered ({what}); mend it, or give "
                    "--skip-bad to go on without such prompts."
                ) from None
            continue
        if ids:
            yield each, ids


def _params(data: DataFolder, number: int, turn: int, length: int) -> SamplingParams:
    """Return how a prompt is answered; each turn of each prompt has its own seed."""
    about = data.about
    return SamplingParams(
        temperature=about.temperatures[number % len(about.temperatures)],
        max_tokens=min(about.max_tokens, about.context - length),
        seed=(about.seed << 40) + (number << 8) + turn,
    )
