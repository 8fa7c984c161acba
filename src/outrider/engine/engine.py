"""The engine: ``add``, ``abort``, and one ``step`` for plain and speculative decoding alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar

from tokenizers import Tokenizer

from ..base.config import EngineConfig
from ..base.methods import NONE
from ..base.types import Counts, Event, Plan, Request, SequenceState, StepRecord, StepSeconds
from ..cache.pages import PagePool, extend_keys
from ..cache.snapshots import Snapshots
from ..drafters.base import Drafter
from ..errors import RequestError
from ..models.base import Model
from ..native.native_sampling import measurer, sequence_pipeline, shared_noise
from ..sampling.acceptance import AcceptanceRule
from ..sampling.grammar import Grammars
from ..sampling.pipeline import RequestPipeline
from ..text.detokenize import Detokenizer
from ..text.panics import no_panic
from .control.chooser import AdaptiveChooser, Chooser
from .control.controller import Controller
from .control.costs import CostModel
from .control.summary import summary
from .control.switch import Menu, SpeculationState
from .drafting import Drafting
from .memory import Budget
from .scheduler import Scheduler
from .verify import Verifier

D = TypeVar("D", bound=Drafter)

KNOWN_WORD_LISTS = 4  # lists of bad words whose ids are kept


class Engine:
    """One target with its drafters and one KV cache; ``build.build_engine`` makes it.

    ``drafter`` names the default among the ``drafters``, which include ``none``; requests may name
    another. ``together`` and ``portfolio`` are those of ``Menu``. The ``controller`` chooses what
    the switch and requests leave open of drafters and draft lengths; None if nothing can be open.
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
        tokenizes: Callable[[], Tokenizer] | None,
        together: Sequence[tuple[str, ...]] = (),
        portfolio: Sequence[str] = (),
        controller: Controller | None = None,
    ) -> None:
        shape, drafters = model.shape, dict(drafters)
        self.model = model
        self.config = config
        self.budget = budget
        self.max_model_len = max_model_len
        self.noise = shared_noise(shape.vocab_size)
        self.scheduler = Scheduler(
            PagePool(budget.pages, config.page_size),
            budget.sequences,
            config.max_num_batched_tokens,
            max_model_len,
            caches=model.paged and config.enable_prefix_caching,
            snapshots=Snapshots(budget.snapshot_bytes) if model.shape.stateful else None,
        )
        store = model.new_store(budget.pages + budget.scratch, config.page_size)
        for each in drafters.values():
            each.attach(store)
        self.scheduler.ahead = max([each.ahead for each in drafters.values()], default=0)
        raw = config.logprobs_mode == "raw_logprobs"
        self.verifier = Verifier(model, store, rule, self.noise, raw, measurer())
        self.controller = controller
        self.menu = Menu(
            drafters,
            SpeculationState(drafter != NONE, drafter, config.num_speculative_tokens),
            config.max_draft_length,
            together,
            portfolio,
            None if controller is None else controller.methods,
        )
        noise = rule.drafting(self.noise)
        drafting = self.drafting = Drafting(drafters, self.menu, noise, shape.vocab_size)
        # Under a rule that needs no logits, a step without drafts has the same output.
        free = not rule.needs_logits
        if controller is None:
            self.chooser = Chooser(self.menu, CostModel(), tries_plain=free)
        else:
            calls = drafting.peek, drafting.num_unread
            self.chooser = AdaptiveChooser(
                self.menu, controller, drafters, drafting.preparing, *calls, free
            )
            drafting.promises = self.chooser.promises
        self.counts = Counts()
        self._tokenizes = tokenizes
        self.grammars = Grammars(tokenizes, shape.vocab_size, shape.eos_token_ids)
        self._live: dict[str, dict[int, SequenceState]] = {}
        self.record: StepRecord | None = None  # the last step, until it is settled
        self.later: Iterator[None] | None = None  # work for spare time, see ``find_costs``
        self._bad_words = lru_cache(KNOWN_WORD_LISTS)(self._bad_word_ids)  # once for all prompts

    def add(self, request: Request) -> None:
        """Queue a request; raises what ``prepare`` and ``enqueue`` raise."""
        self.enqueue(self.prepare(request))

    def enqueue(self, sequences: list[SequenceState]) -> None:
        """Queue the sequences of a request that ``prepare`` made.

        Raises RequestError if the id is in use, MemoryBudgetError if the cache cannot hold it.
        """
        request = sequences[0].request
        if request.id in self._live:
            raise RequestError(f"request id {request.id!r} is in use; give another.")
        for sequence in sequences:
            self._leave_open(sequence)
            self.scheduler.add(sequence)
        self._live[request.id] = {s.sample_index: s for s in sequences}

    def take_over(self, other: Engine) -> None:
        """Take over the requests and counts of another engine with the same target.

        Its cached tokens are computed again; new tokens depend on seeds and positions alone. Raises
        MemoryBudgetError if the cache cannot hold one of the requests; nothing is moved then.
        """
        other.settle()
        for sequence in self.scheduler.take_over(other.scheduler):
            other._forget(sequence, ended=False)
            self._leave_open(sequence)
        self._live, other._live = other._live, {}
        self.counts = other.counts
        mine, its = self.chooser.costs, other.chooser.costs
        mine.draft_seconds, mine.verify_seconds = its.draft_seconds, its.verify_seconds

    def _leave_open(self, sequence: SequenceState) -> None:
        """Leave the drafter to the engine if a request names one that this engine lacks."""
        request = sequence.request
        wishes = request.speculation
        if wishes.drafter is not None and wishes.drafter not in self.menu.names:
            open_ = replace(wishes, drafter=None)
            sequence.request = replace(request, speculation=open_)

    def prepare(self, request: Request) -> list[SequenceState]:
        """Return the sequences of a request that ``InputProcessor`` has checked, one per sample.

        It touches nothing that a step touches, so another thread may call it during a step. Raises
        RequestError if an option does not fit this model.
        """
        self.menu.check(request.speculation)
        prompt, params = request.prompt_token_ids, request.params
        pipeline = self.pipeline_of(request)
        keys: list[bytes] = []
        size = self.config.page_size
        extend_keys(keys, prompt, len(prompt) // size, size, request.cache_salt)
        # Without stop strings the frontend detokenises.
        writes = self._tokenizes() if params.stop and self._tokenizes else None
        stops, shows = params.stop or (), params.include_stop_str_in_output
        sequences: list[SequenceState] = []
        for i in range(params.n):
            text = Detokenizer(writes, prompt, stops, shows, params.skip_special_tokens)
            own = sequence_pipeline(pipeline, i)
            sequence = SequenceState(f"{request.id}/{i}", request, i, text, own, list(prompt))
            sequence.keys += keys
            sequences.append(sequence)
        return sequences

    def pipeline_of(self, request: Request) -> RequestPipeline:
        """Return the logits pipeline of a request, which its samples share; see ``prepare``."""
        params, vocabulary = request.params, self.model.shape.vocab_size
        words = self._bad_words(tuple(params.bad_words or ()))
        grammar = self.grammars.compile(params)
        return RequestPipeline(request, vocabulary, words, grammar)

    def _bad_word_ids(self, words: tuple[str, ...]) -> list[list[int]]:
        """Return the token ids of every bad word, at the beginning of a text and after a space.

        As in vLLM, those after a space count only if they are as many and begin otherwise.
        """
        written: list[list[int]] = []
        for word in words:
            assert self._tokenizes is not None
            tokenizer = self._tokenizes()
            with no_panic():
                bare, spaced = (
                    tokenizer.encode(text, add_special_tokens=False).ids
                    for text in (word.lstrip(), " " + word.lstrip())
                )
            written.append(bare)
            if len(spaced) == len(bare) and spaced[:1] != bare[:1]:
                written.append(spaced)
        return [ids for ids in written if ids]

    def abort(self, request_id: str) -> None:
        """Drop a request's sequences and free their pages at once; an unknown id is no error."""
        self.settle()
        for sequence in self._live.pop(request_id, {}).values():
            self.scheduler.remove(sequence)
            self._forget(sequence, ended=True)

    @property
    def drafter(self) -> Drafter:
        """The drafter of requests that name none."""
        return self.drafting.drafters[self.menu.default]

    @property
    def beliefs(self) -> dict[str, Any] | None:
        """The controller's beliefs, see ``summary``; None without a controller.

        For a mixture it adds the experts per layer that a step reads, by its rows, and how
        ``strange`` rows are to each other: 0 if they share all experts, 1 if they are unrelated.
        """
        if self.controller is None:
            return None
        known, unions = summary(self.controller), self.verifier.unions
        if unions is None:
            return known
        strange = self.controller.costs.strange
        return known | {"experts": unions.summary(), "strange": strange}

    @property
    def has_work(self) -> bool:
        """True while any sequence waits or runs."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def step(self) -> list[Event]:
        """Run one step: choose, schedule, draft, verify, commit. Return the emitted events.

        The caller delivers the events, then calls ``settle``; otherwise the next step calls it.
        """
        self.settle()
        scheduler, chooser, drafting = self.scheduler, self.chooser, self.drafting
        seconds = StepSeconds()
        chooser.choose(scheduler.decoding)
        plan = scheduler.schedule(chooser.budget, chooser.max_rows, seconds)
        for sequence in plan.preempted:
            self._forget(sequence, ended=False)
        if not plan.batch:
            return []
        if scheduler.snapshots is not None:
            self._begin_with_states(plan)
        draft = chooser.cut(plan, drafting.propose(plan))
        verdict, states = self.verifier.verify(plan, draft, drafting.target_layers)
        record = scheduler.commit(plan, draft, verdict, states)
        if scheduler.snapshots is not None:
            for item in plan.batch:
                if item.start + item.count == item.sequence.prompt_length:
                    self._keep_states(item.sequence)
        for sequence in record.ended:
            self._close(sequence)
        self.record = record
        return record.events

    def settle(self) -> None:
        """Report the last step to drafters and chooser, once; its events need not wait for this."""
        record, self.record = self.record, None
        if record is None:
            return
        self.drafting.observe(record)
        self.chooser.learn(record)
        for sequence in record.ended:
            self._forget(sequence, ended=True)

    def _close(self, sequence: SequenceState) -> None:
        """Remove a sample that has ended from the live ones, and add up its counts."""
        samples = self._live[sequence.request.id]
        del samples[sequence.sample_index]
        if not samples:
            del self._live[sequence.request.id]
        self.counts.add(sequence.counts)

    def _begin_with_states(self, plan: Plan) -> None:
        """Restore the states of sequences that begin after pages computed by others."""
        for item in plan.batch:
            sequence = item.sequence
            if sequence.states is not None:
                self.verifier.store.set_states(sequence.id, sequence.states, item.start)
                sequence.states = None

    def _keep_states(self, sequence: SequenceState) -> None:
        """Keep a snapshot of a sequence's states at the end of its last full page."""
        snapshots, size = self.scheduler.snapshots, self.config.page_size
        if snapshots is None:
            return
        store = self.verifier.store
        pages = store.kept_tokens(sequence.id) // size
        if not 0 < pages <= len(sequence.keys):
            return
        key = sequence.keys[pages - 1]
        if key in snapshots:
            snapshots.get(key)  # counts as used
        else:
            snapshots.put(key, store.kept_states(sequence.id))

    def _forget(self, sequence: SequenceState, ended: bool) -> None:
        self._keep_states(sequence)
        if ended:
            self.chooser.release(sequence.id)
        self.drafting.release(sequence.id, ended)
        self.verifier.store.release(sequence.id)
        self.noise.release(sequence.id)
        if ended:
            del sequence.pipeline  # else every reference to the sequence keeps its grammar

    @contextmanager
    def watched(self, wrap: Callable[[Drafter], D]) -> Iterator[D]:
        """Replace the default drafter by ``wrap(drafter)``, which then drafts in every step."""
        menu, chooser, drafters = self.menu, self.chooser, self.drafting.drafters
        inner = self.drafter
        drafters[inner.name] = wrapper = wrap(inner)
        depth = menu.state.num_speculative_tokens or menu.max_depth
        state = SpeculationState(menu.state.enabled, inner.name, depth)
        chains = isinstance(chooser, AdaptiveChooser)  # else the user asked for trees
        self.menu = Menu(drafters, state, menu.max_depth, chains=chains)
        self.chooser = Chooser(self.menu, chooser.costs, tries_plain=False)
        self.drafting.menu = self.menu
        self.drafting.refresh()
        try:
            yield wrapper
        finally:
            drafters[inner.name] = inner
            self.menu, self.chooser, self.drafting.menu = menu, chooser, menu
            self.drafting.refresh()
