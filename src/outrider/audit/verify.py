"""The audit of a pair, which tests that speculating loses nothing.

(a) Plain greedy decoding gives the tokens of ``transformers``, in fp32.
(b) Under coupling, plain and speculative decoding give the same tokens, in fp32: many mixes of
    drafters, draft lengths, trees, batches, options and seeds.
(c) Each acceptance rule emits the target's distribution: on contexts recorded from the pair,
    against distributions recomputed from raw logits in float64. One bound covers the false alarms
    of all comparisons.

Where outputs differ, ``ties`` measures the effect of rounding: a gap within that counts as a
numerical tie, anything else as a violation.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..base.config import Recipe
from ..base.methods import AUTO
from ..base.types import Folder, Request, SamplingParams
from ..checkpoints.checkpoint import open_checkpoint
from ..checkpoints.folders import find_folder
from ..checkpoints.tokenizers import has_tokenizer, read_codec
from ..drafters.model import ModelSpec
from ..drafters.ngram import NgramSpec
from ..drafters.registry import sibling
from ..errors import ConfigError, RequestError
from ..llm import LLM
from ..models.base import Model
from ..sampling.acceptance import AcceptanceRule
from ..sampling.ratio import RULES
from ..sampling.seeds import fresh_seed
from .contexts import LAW_ERROR, record
from .faults import Fault
from .outcome import AuditReport, Check, visible_error
from .sweep import MIXES, MORE_MIXES, TEXT_OPTIONS, Mix, asks, decode, open_mix
from .ties import Difference, compare
from .trial import comparisons, try_rule

FALSE_ALARM = 1e-6  # probability of any false alarm in the statistical comparisons of an audit
LARGEST_TIE = 1e-3  # largest gap of two scores z + g that may be a numerical tie in fp32
CONTEXT = 48  # tokens of a recorded context
LARGEST_DRAFT = 16  # room for drafts after the longest request

Progress = Callable[[str], None]


@dataclass(frozen=True)
class AuditSize:
    """The size of an audit; ``seeds`` are of each prompt and option, ``draws`` of each context."""

    name: str
    prompts: int
    prompt_tokens: int
    tokens: int
    seeds: int
    mixes: tuple[Mix, ...]
    contexts: int
    draws: int


QUICK = AuditSize("quick", 4, 64, 20, 1, MIXES, 16, 2**13)
THOROUGH = AuditSize("thorough", 16, 256, 64, 2, MORE_MIXES, 64, 2**16)


class Audit:
    """One audit of the target ``model``, a folder or hub name, with a drafter as for ``LLM``.

    ``prompts``, texts or token ids, are cut to ``size.prompt_tokens``; ``seed`` determines
    everything that is drawn. Options are ``quantization``, ``drafter_quantization``,
    ``drafter_window`` and ``preset``.
    """

    def __init__(
        self, model: Folder, drafter: Folder | None, prompts: Sequence[str | Sequence[int]],
        size: AuditSize, seed: int, fault: Fault, progress: Progress, **options: int | str | None,
    ) -> None:  # fmt: skip
        self.folder = find_folder(model)
        self.size = size
        self.fault = fault
        self.progress = progress
        self._python, self._numpy = random.Random(seed), np.random.default_rng(seed)
        quantization = options.get("quantization")
        self._recipe = None if quantization is None else Recipe.parse(quantization)
        if self._recipe is not None and self._recipe.coarse:
            raise ConfigError(
                f"quantization is {str(self._recipe)!r}, but transformers has no activations of 8 "
                "bits to compare with; leave -a8 out."
            )
        exact = {"dtype": "float32", "activations": "16"}
        self._options: dict[str, Any] = {"model": self.folder, **exact, **options}
        context = open_checkpoint(self.folder).shape.context
        output = size.tokens + LARGEST_DRAFT
        self._options["max_model_len"] = longest = min(context, size.prompt_tokens + output)
        room = longest - output
        if room < 1:
            raise ConfigError(
                f"{self.folder} has a context of {context} tokens, and this audit needs "
                f"{output + 1}; audit a model with a longer one."
            )
        self.plain = LLM(**self._options, drafter=None, max_num_seqs=1)
        if not self.plain.engine.model.truncates:
            raise ConfigError(
                f"{self.folder} cannot go back to an earlier token, so nothing is ever drafted for "
                "it and there is nothing to audit."
            )
        if drafter == AUTO:  # auto has mixes of its own
            drafter = NgramSpec.name if sibling(self.folder) is None else ModelSpec.name
        self._options["drafter"] = drafter
        self.prompts = [self._encode(p)[:room] for p in prompts[: size.prompts]]
        self.longest = max(len(p) for p in self.prompts) + size.tokens

    def _encode(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if has_tokenizer(self.folder):
            return read_codec(self.folder).encode(prompt)
        return [b % self.plain.engine.model.shape.vocab_size for b in prompt.encode()]

    def against_transformers(self) -> Check:
        """Return check (a): one forward pass of transformers judges all tokens of a prompt."""
        self.progress("plain decoding against transformers")
        check = Check("greedy", "plain greedy decoding says what transformers says, fp32")
        from .reference import logits_of, transformers_model  # with torch, for this check alone

        theirs = transformers_model(self.folder, self._recipe)
        params = SamplingParams(temperature=0, max_tokens=self.size.tokens, ignore_eos=True)
        for prompt in self.prompts:
            ids = self.plain.generate([prompt], params)[0].outputs[0].token_ids
            logits = logits_of(theirs, prompt + ids[:-1])[len(prompt) - 1 :]
            check.tested += len(ids)
            for at, token in enumerate(logits.argmax(-1).tolist()):
                ours, expected = ids[: at + 1], [*ids[:at], token]
                difference = compare(self.plain, prompt, params, expected, ours, seed=0)
                if difference is not None:
                    # The spread over row counts does not cover two implementations.
                    gap = max(difference.gap, float(logits[at].max() - logits[at, ids[at]]))
                    tie = replace(difference, gap=gap, is_tie=gap <= LARGEST_TIE)
                    self._record(check, tie, f"prompt {prompt[:3]}")
        return check

    def equality(self) -> Check:
        """Return check (b): every mix against plain decoding of one request at a time."""
        check = Check(
            "equality", "the same seed gives the same tokens, plain and speculative, fp32"
        )
        size, vocabulary = self.size, self.plain.engine.model.shape.vocab_size
        text = self._writes_json
        queued = asks(self.prompts, size.tokens, size.seeds, vocabulary, text, self._python)
        self.progress("plain decoding, one request at a time")
        answers = {
            (ask.params.seed or 0, index): ids
            for ask in queued
            for _, samples in decode(self.plain, [ask], 1)
            for index, ids in enumerate(samples)
        }
        for mix in self.size.mixes:
            if not self._can_run(mix):
                continue
            self.progress(f"speculative decoding: {mix}")
            budget = (self._drafting if mix.drafter == "model" else self.plain).engine.budget
            page_bytes = (budget.target_bytes + budget.drafter_bytes) // budget.pages
            llm = open_mix(
                mix, self._options, page_bytes, answers, self.longest, self._python, self.fault
            )
            for ask, samples in decode(llm, queued, mix.batch):
                for index, ids in enumerate(samples):
                    check.tested += len(ids)
                    seed = ask.params.seed or 0
                    difference = compare(
                        self.plain, ask.prompt, ask.params, answers[seed, index], ids, seed=seed,
                        sample_index=index,
                    )  # fmt: skip
                    if difference is not None:
                        tie = difference.is_tie and difference.measured <= LARGEST_TIE
                        where = f"{mix}, {ask.option}, seed {seed}, sample {index}"
                        self._record(check, replace(difference, is_tie=tie), where)
            counts = llm.engine.counts
            check.runs.append((str(mix), counts.drafted, counts.accepted))
        return check

    @staticmethod
    def _record(check: Check, difference: Difference, where: str) -> None:
        first, second = difference.tokens
        text = (
            f"{where}: token {first} or {second} at position {difference.position}, "
            f"gap {difference.gap:.3g}, measured noise {difference.measured:.3g}"
        )
        (check.ties if difference.is_tie else check.violations).append(text)

    @property
    def _writes_json(self) -> bool:
        """Return True if the model has the words and the end that ``TEXT_OPTIONS`` need."""
        params = SamplingParams(**TEXT_OPTIONS["JSON schema"])
        eos = self.plain.engine.model.shape.eos_token_ids
        try:
            self.plain.engine.pipeline_of(Request("json", (0,), params, 0, eos))
        except RequestError:
            return False
        return True

    def _can_run(self, mix: Mix) -> bool:
        if mix.drafter == "tree":
            return self.plain.engine.model.trees
        if mix.drafter == AUTO:
            return self.fault.pipeline is None  # faults need one of the other drafters
        return mix.drafter != "model" or self._drafting.engine.drafter.model is not None

    @cached_property
    def _drafting(self) -> LLM:
        return LLM(**self._options)

    def distributions(self) -> Check:
        """Return check (c): the engine's own rules over recorded contexts."""
        self.progress("recording contexts")
        size = self.size
        check = Check("distributions", "each acceptance rule emits the target's distribution")
        contexts = self._contexts()
        engine, own = self._drafting.engine, self._drafting.engine.drafter
        # Heads and other vocabularies have no law for every row; certain drafts test the rules.
        alike = own.model if own.name == ModelSpec.name else None
        assert alike is None or isinstance(alike, Model)
        recorded, error = record(engine.model, alike, contexts, self._numpy)
        if error > LAW_ERROR:
            check.violations.append(
                f"a processed distribution is {error:.3g} (total variation) from the oracle's"
            )
        if 2 * len(recorded) < len(contexts):
            check.violations.append(
                f"only {len(recorded)} of {len(contexts)} contexts could be tested"
            )
            return check
        fault = self.fault.rule
        rules: list[AcceptanceRule] = [fault] if fault else [make() for make in RULES.values()]
        alpha = FALSE_ALARM / comparisons(recorded, len(rules))
        for rule in rules:
            self.progress(f"rule {rule.name}: {len(recorded)} contexts x {size.draws} draws")
            check.findings += try_rule(rule, recorded, size.draws, alpha, self._numpy)
        check.tested = len(check.findings)
        check.violations += [
            f"{f.what}: total variation {f.variation:.3g} over {f.draws} draws, statistic "
            f"{f.statistic:.3g} above {f.threshold:.3g}"
            for f in check.findings
            if f.wrong
        ]
        check.contexts = len(recorded)
        return check

    def _contexts(self) -> list[list[int]]:
        """Return the last tokens of texts that the target wrote, cut at random positions."""
        params = [
            SamplingParams(
                temperature=1.0, max_tokens=self.size.tokens, ignore_eos=True,
                seed=int(self._numpy.integers(0, 2**53)),
            )
            for _ in self.prompts
        ]  # fmt: skip
        texts = [
            o.prompt_token_ids + o.outputs[0].token_ids
            for o in self._drafting.generate(self.prompts, params)
        ]
        contexts = []
        for i in range(self.size.contexts):
            text = texts[i % len(texts)]
            end = int(self._numpy.integers(1, len(text) + 1))
            contexts.append(text[max(0, end - CONTEXT) : end])
        return contexts


def verify(
    model: Folder, prompts: Sequence[str | Sequence[int]], drafter: Folder | None = "auto",
    size: AuditSize = QUICK, seed: int | None = None, fault: Fault | None = None,
    progress: Progress = lambda _: None, **options: int | str | None,
) -> AuditReport:  # fmt: skip
    """Return the report of an ``Audit``. Raises OutriderError: a checkpoint or option is wrong."""
    seed = fresh_seed() if seed is None else seed
    audit = Audit(model, drafter, prompts, size, seed, fault or Fault("none"), progress, **options)
    checks = [audit.against_transformers(), audit.equality(), audit.distributions()]
    return AuditReport(
        model=str(model),
        drafter=audit._drafting.drafter.name,
        size=size.name,
        seed=seed,
        fault=audit.fault.name,
        draws=size.draws,
        checks=checks,
        visible=visible_error(checks[-1].findings),
    )
