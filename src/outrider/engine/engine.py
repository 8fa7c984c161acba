"""The engine: ``add``, ``abort``, and one ``step`` for plain and speculative decoding alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from ..base.config import EngineConfig
from ..base.types import Counts, Draft, Event, HiddenStates, Request, SequenceState, Verdict
from ..cache.pages import PagePool, extend_keys
from ..drafters.base import Drafter, NoSpec
from ..errors import ConfigError, RequestError
from ..models.base import Model
from ..native.native_sampling import measurer, sequence_pipeline, shared_noise
from ..sampling.acceptance import AcceptanceRule
from ..sampling.grammar import Grammars
from ..sampling.pipeline import RequestPipeline
from ..text.detokenize import Detokenizer
from ..text.panics import no_panic
from .adaptive import Adaptive, Seconds
from .control.controller import Controller
from .control.costs import StepCosts
from .control.summary import summary
from .drafting import Speculator
from .memory import Budget
from .scheduler import Plan, Scheduler
from .switch import SpeculationState
from .verify import Runner

KNOWN_WORDS = 4
"""Lists of bad words whose ids are kept."""


def check_drafter(drafter: Drafter, rule: AcceptanceRule, model: Model) -> None:
    """Refuse a drafter whose trees cannot be verified, or whose hidden states are not to be had.

    Raises:
        ConfigError: rule or model knows chains only, or the model lacks the states.
    """
    layers, branches = model.hidden_layers, drafter.max_nodes > drafter.max_length
    wrong = [layer for layer in drafter.target_layers if not -1 <= layer < layers]
    if wrong:
        raise ConfigError(
            f"drafter {drafter.name!r} wants the hidden states of layer {wrong[0]}, which this "
            f"{model.shape.family!r} model does not give; use another drafter."
        )
    if branches and not rule.trees:
        raise ConfigError(
            f"acceptance_rule {rule.name!r} cannot verify the trees of drafter "
            f"{drafter.name!r}; use 'coupled', or a drafter of chains."
        )
    if branches and not model.trees:
        raise ConfigError(
            f"a {model.shape.family!r} model has no native path, and without one cannot "
            f"verify the trees of drafter {drafter.name!r}; use a drafter of chains."
        )


class _Seconds(NamedTuple):
    """The seconds of a step up to its events, and those of its drafting and verifying."""

    step: float
    draft: float
    verify: float


class Engine:
    """One target, its drafters, one cache; made of its parts, see ``build.build_engine``.

    Args:
        model: the target.
        drafters: by name; ``none`` among them.
        rule: decides which drafted tokens stand.
        config: limits.
        budget: of the cache.
        max_model_len: longest sequence, in tokens.
        drafter: the name of the one that drafts unless a request names another.
        tokenizer: the target's, None for a model without text.
        together, portfolio: see ``Speculator``.
        controller: chooses drafters and draft lengths that nobody else chose; None if all are.

    Raises:
        ConfigError: a drafter drafts trees, and rule or model knows chains only.
    """

    def __init__(
        self,
        model: Model,
        drafters: Mapping[str, Drafter],
        rule: AcceptanceRule,
        config: EngineConfig,
        budget: Budget,
        max_model_len: int,
        drafter: str,
        tokenizer: Tokenizer | None,
        together: Sequence[tuple[str, ...]] = (),
        portfolio: Sequence[str] = (),
        controller: Controller | None = None,
    ) -> None:
        shape, device = model.shape, model.device
        self.model = model
        self.config = config
        self.budget = budget
        self.max_model_len = max_model_len
        for each in drafters.values():
            check_drafter(each, rule, model)
        self.noise = shared_noise(shape.vocab_size, device)
        self.scheduler = Scheduler(
            PagePool(budget.pages, config.page_size),
            config.max_num_seqs,
            config.max_num_batched_tokens,
            max_model_len,
            caches=model.paged and config.enable_prefix_caching,
        )
        store = model.new_store(budget.pages + budget.scratch, config.page_size)
        for each in drafters.values():
            each.attach(store)
        raw = config.logprobs_mode == "raw_logprobs"
        self.runner = Runner(model, store, rule, self.noise, raw, measurer(device))
        self.speculator = Speculator(
            drafters,
            SpeculationState(drafter != NoSpec.name, drafter, config.num_speculative_tokens),
            rule.drafting(self.noise),
            shape.vocab_size,
            config.max_draft_length,
            together,
            portfolio,
            probes=not rule.needs_logits,  # else a step without drafts has another output
            adaptive=None
            if controller is None
            else Adaptive(controller, drafters, peeks=not rule.needs_logits),
        )
        self.costs = StepCosts()
        self.counts = Counts()
        self._tokenizer = tokenizer
        self.grammars = Grammars(tokenizer, shape.vocab_size, shape.eos_token_ids)
        self._live: dict[str, dict[int, SequenceState]] = {}
        self._unsettled: Callable[[], None] | None = None
        self._bad_words = lru_cache(KNOWN_WORDS)(self._bad_word_ids)  # once for all its prompts

    def add(self, request: Request) -> None:
        """Queue a request; its ``n`` samples become sequences of their own.

        Raises:
            RequestError: an option does not fit this model, or the id is in use.
            MemoryBudgetError: the cache could never hold it.
        """
        self.enqueue(self.prepare(request))

    def enqueue(self, sequences: list[SequenceState]) -> None:
        """Queue what ``prepare`` made of a request.

        Raises:
            RequestError: the id is in use.
            MemoryBudgetError: the cache could never hold it.
        """
        request = sequences[0].request
        if request.id in self._live:
            raise RequestError(f"request id {request.id!r} is in use; give another.")
        for sequence in sequences:
            self.scheduler.add(sequence)
        self._live[request.id] = {s.sample_index: s for s in sequences}

    def prepare(self, request: Request) -> list[SequenceState]:
        """Return the sequences of a request that ``InputProcessor`` has checked.

        Touches nothing that a step does, so that another thread may call it meanwhile.

        Raises:
            RequestError: an option does not fit this model.
        """
        self.speculator.check(request)
        prompt, params = request.prompt_token_ids, request.params
        pipeline = self.pipeline_of(request)
        keys: list[bytes] = []
        size = self.config.page_size
        extend_keys(keys, prompt, len(prompt) // size, size, request.cache_salt)
        writes = self._tokenizer if params.stop else None  # else the frontend writes the text
        sequences = [
            SequenceState(
                id=f"{request.id}/{i}",
                request=request,
                sample_index=i,
                text=Detokenizer(
                    writes,
                    prompt,
                    params.stop or (),
                    params.include_stop_str_in_output,
                    params.skip_special_tokens,
                ),
                pipeline=sequence_pipeline(pipeline, i),
                tokens=list(prompt),
            )
            for i in range(params.n)
        ]
        for sequence in sequences:
            sequence.keys += keys
        return sequences

    def pipeline_of(self, request: Request) -> RequestPipeline:
        """Return the logits pipeline of a request, which its samples share.

        Raises:
            RequestError: an option does not fit this model, or cannot be met.
        """
        params, vocabulary = request.params, self.model.shape.vocab_size
        words = self._bad_words(tuple(params.bad_words or ()))
        grammar = self.grammars.compile(params)
        return RequestPipeline(request, vocabulary, self.model.device, words, grammar)

    def _bad_word_ids(self, words: tuple[str, ...]) -> list[list[int]]:
        """Return the ids of every bad word, behind a space and at the beginning of a text.

        Written after a space only where that is one token sequence as long, as vLLM does.
        """
        found: list[list[int]] = []
        for word in words:
            assert self._tokenizer is not None
            with no_panic():
                bare, spaced = (
                    self._tokenizer.encode(text, add_special_tokens=False).ids
                    for text in (word.lstrip(), " " + word.lstrip())
                )
            found.append(bare)
            if len(spaced) == len(bare) and spaced[:1] != bare[:1]:
                found.append(spaced)
        return [ids for ids in found if ids]

    def abort(self, request_id: str) -> None:
        """Drop a request's sequences and free their pages at once; an unknown id is no error."""
        self.settle()
        for sequence in self._live.pop(request_id, {}).values():
            self.scheduler.remove(sequence)
            self._forget(sequence, ended=True)

    @property
    def drafter(self) -> Drafter:
        """The drafter of requests that name none."""
        return self.speculator.default

    @property
    def beliefs(self) -> dict[str, Any] | None:
        """The controller's beliefs, see ``beliefs.summary``; None without a controller."""
        adaptive = self.speculator.adaptive
        return None if adaptive is None else summary(adaptive.controller)

    @property
    def has_work(self) -> bool:
        """True while any sequence waits or runs."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def step(self) -> list[Event]:
        """Schedule, draft, verify, commit; return what was emitted.

        Whoever hands the events on calls ``settle`` afterwards, else the next step does.
        """
        self.settle()
        begin = time.perf_counter()
        scheduler, speculator = self.scheduler, self.speculator
        sequences = scheduler.decoding
        decoding = len(sequences)
        speculator.pause(speculator.probes and self.costs.probe_due(decoding))
        speculator.plan(sequences)
        chunk: int | None = None
        if not all(sequence.request.offline for sequence in sequences):
            chunk = self.costs.max_chunk(self.config.max_num_batched_tokens)
        plan = scheduler.schedule(speculator.budget, chunk, decoding)
        for sequence in plan.preempted:
            self._forget(sequence, ended=False)
        if not plan.batch:
            return []
        scheduled = time.perf_counter()
        draft = speculator.cut(plan, self._fitted(plan, speculator.propose(plan)))
        drafted = time.perf_counter()
        verdict, states = self.runner.verify(plan, draft, speculator.target_layers)
        verified = time.perf_counter()
        events = scheduler.commit(plan, draft, verdict)
        ended: list[SequenceState] = []
        events = [self._closed(e, ended) if e.finish_reason is not None else e for e in events]
        took = _Seconds(time.perf_counter() - begin, drafted - scheduled, verified - drafted)
        self._unsettled = partial(
            self._settle, plan, draft, verdict, states, ended, len(events), took
        )
        return events

    def settle(self) -> None:
        """Tell drafters, controller and costs of the last step, if they do not know it yet.

        That takes time, as states have to be computed, which no event waits for.
        """
        rest, self._unsettled = self._unsettled, None
        if rest is not None:
            rest()

    def _settle(
        self,
        plan: Plan,
        draft: Draft,
        verdict: Verdict,
        states: HiddenStates | None,
        ended: list[SequenceState],
        emitted: int,
        took: _Seconds,
    ) -> None:
        begin, speculator = time.perf_counter() - took.step, self.speculator
        speculator.observe(plan, draft, verdict, states)
        if speculator.adaptive is not None:
            seconds = Seconds(time.perf_counter() - begin, took.verify, speculator.spent)
            speculator.adaptive.learn(plan, draft, emitted, seconds)
        self.costs.observe(
            rows=plan.rows,
            decoding=plan.decoding,
            emitted=emitted,
            drafters={item.drafter for item, t in zip(plan.batch, draft.tokens, strict=True) if t},
            seconds=time.perf_counter() - begin,
            draft_seconds=took.draft,
            verify_seconds=took.verify,
        )
        for sequence in ended:
            self._forget(sequence, ended=True)

    @staticmethod
    def _fitted(plan: Plan, draft: Draft) -> Draft:
        """Cut drafts to what grammars accept; drafts with distributions comply already."""
        for i, item in enumerate(plan.batch):
            pipeline, depth = item.sequence.pipeline, item.budget.depth
            if (
                not depth
                or not pipeline.has_grammar
                or (draft.logits and draft.logits[i] is not None)
            ):
                continue
            try:
                draft.tokens[i], draft.parents[i] = pipeline.fit(
                    item.sequence.tokens, draft.tokens[i], draft.parents[i], depth
                )
            except Exception:  # the target will meet it too, and say so
                draft.tokens[i], draft.parents[i] = [], []
        return draft

    def _closed(self, event: Event, ended: list[SequenceState]) -> Event:
        """Move the sample that ``event`` ends to ``ended``; the event takes its counts along."""
        samples = self._live[event.request_id]
        done = samples.pop(event.sample_index)
        if not samples:
            del self._live[event.request_id]
        self.counts.add(done.counts)
        ended.append(done)
        return event._replace(counts=done.counts)

    def _forget(self, sequence: SequenceState, ended: bool) -> None:
        self.speculator.release(sequence.id, ended)
        self.runner.store.release(sequence.id)
        self.noise.release(sequence.id)
