"""The engine: ``add``, ``abort``, and one ``step`` for plain and speculative decoding alike."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from tokenizers import Tokenizer

from ..cache.pages import PagePool
from ..cache.prefix import extend_keys
from ..config import DEFAULT_SHARE, EngineConfig, free_memory, parse_memory
from ..drafters.base import Drafter
from ..drafters.registry import DrafterSpec
from ..errors import ConfigError, MemoryBudgetError, ModelError, RequestError
from ..limits import LARGEST_INT
from ..models.base import Model
from ..models.families import read_config, read_shape
from ..models.load import load_model
from ..native.laws import measurer, sequence_law, shared_noise
from ..params import DEFAULT_MAX_TOKENS
from ..sampling.grammar import Grammars
from ..sampling.law import RequestLaw
from ..sampling.ratio import make_rule
from ..text.detokenize import Detokenizer
from ..types import Counts, Draft, Event, Request, Sequence, check_vocabulary
from .pace import Pace
from .runner import Runner
from .scheduler import Plan, Scheduler

logger = logging.getLogger("outrider")
KNOWN_WORDS = 4
"""Lists of bad words whose ids are kept."""


@dataclass(frozen=True)
class Budget:
    """What the cache was given: told at start."""

    pages: int
    page_size: int
    sequences: int
    target_bytes: int
    drafter_bytes: int

    @property
    def tokens(self) -> int:
        """Tokens that the cache holds at once."""
        return (self.pages - 1) * self.page_size

    def __str__(self) -> str:
        total = self.target_bytes + self.drafter_bytes
        share = self.drafter_bytes / total
        return (
            f"cache: {self.pages - 1} pages of {self.page_size} tokens = {self.tokens} tokens, "
            f"up to {self.sequences} sequences at once, {total / 2**20:.0f} MiB "
            f"({share:.0%} of it the drafter's)"
        )


def plan_budget(
    config: EngineConfig, max_length: int, target_bytes: int, drafter_bytes: int
) -> Budget:
    """How many pages ``config.memory`` pays for; a page costs target and drafter together.

    Without ``memory``: what ``max_num_seqs`` sequences of full length need, at most half of the
    free memory.

    Raises:
        MemoryBudgetError: not even one sequence of a page fits.
    """
    size = config.page_size
    per_sequence = -(-(max_length + config.num_speculative_tokens) // size)
    most = LARGEST_INT // size  # slots are numbered in int32
    wanted = min(per_sequence * config.max_num_seqs + 1, most)
    each = target_bytes + drafter_bytes
    given = parse_memory(config.memory)
    if given is None:
        given = min(wanted * each, int(free_memory() * DEFAULT_SHARE))
    pages = min(given // each, wanted)
    if pages < 3:
        raise MemoryBudgetError(
            f"memory of {given} bytes holds {given // each} cache pages of {each} bytes, but 3 are "
            f"the least; give {3 * each} bytes or more ({wanted * each} serve every request)."
        )
    free = free_memory()
    if pages * each > free:
        raise MemoryBudgetError(
            f"memory asks for {pages * each} bytes of cache, but only {free} are free; give less."
        )
    return Budget(pages, size, config.max_num_seqs, pages * target_bytes, pages * drafter_bytes)


def _cannot_go_back(folder: Path, model: Model) -> str:
    return (
        f"{folder}: the state of a {model.shape.family!r} model cannot go back to an earlier token"
    )


def fitting_drafter(asked: DrafterSpec, target: Path, model: Model) -> DrafterSpec:
    """``asked``, or no drafter where nobody asked by name and the ``target`` cannot go back.

    Raises:
        ConfigError: a drafter was asked for, and the target cannot go back.
    """
    if model.truncates or asked.name == "none":
        return asked
    why = _cannot_go_back(target, model)
    if not asked.auto:
        raise ConfigError(f"{why}, so nothing can be drafted for it; give drafter=None.")
    logger.warning("%s, so it is decoded plainly, without a drafter.", why)
    return DrafterSpec("none")


class Engine:
    """One target, at most one drafter, one cache.

    Args:
        target: the checkpoint's folder.
        drafter: which drafter, see ``DrafterSpec``.
        config: limits and budgets.
        tokenizer: the target's, None for a model without text.

    Raises:
        ModelError, ConfigError, MemoryBudgetError: what was asked for cannot be served.
    """

    def __init__(
        self,
        target: Path,
        drafter: DrafterSpec,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
    ) -> None:
        device = torch.device("cpu")
        self.config = config
        shape = read_shape(read_config(target), target)
        self.max_model_len = config.model_length(shape.context)
        self.model = load_model(
            target, config.dtype, device, self.max_model_len, config.quantization
        )
        self.spec = drafter = fitting_drafter(drafter, target, self.model)
        drafting = None
        if drafter.folder is not None:
            dtype = str(self.model.dtype).removeprefix("torch.")
            drafting = load_model(
                drafter.folder,
                dtype,
                device,
                self.max_model_len,
                config.drafter_quantization,
                config.window_of(drafter.name),
                self.model,
            )
            if not drafting.truncates:
                why = _cannot_go_back(drafter.folder, drafting)
                raise ModelError(f"{why}, so it cannot draft; give another or drafter='ngram'.")
        mine = self.model.page_bytes(config.page_size)
        theirs = drafting.page_bytes(config.page_size) if drafting else 0
        self.budget = plan_budget(config, self.max_model_len, mine, theirs)
        rule = make_rule(config.acceptance_rule)
        self.drafter: Drafter = drafter.make(
            drafting, config, self.budget.pages, keeps_laws=rule.keeps_laws
        )
        if self.drafter.max_nodes > self.drafter.max_length and not rule.trees:
            raise ConfigError(
                f"acceptance_rule {rule.name!r} cannot verify the trees of drafter "
                f"{self.drafter.name!r}; use 'coupled', or a drafter of chains."
            )
        if self.drafter.max_nodes > self.drafter.max_length and not self.model.trees:
            raise ConfigError(
                f"{target}: a {shape.family!r} model has no native path, and without one cannot "
                f"verify the trees of drafter {self.drafter.name!r}; use a drafter of chains."
            )
        self.noise = shared_noise(shape.vocab_size, device)
        self.scheduler = Scheduler(
            PagePool(self.budget.pages, config.page_size),
            config.max_num_seqs,
            config.max_num_batched_tokens,
            self.max_model_len,
            caches=self.model.paged and config.enable_prefix_caching,
        )
        store = self.model.new_store(self.budget.pages, config.page_size)
        self.draft_noise = rule.drafting(self.noise)
        raw = config.logprobs_mode == "raw_logprobs"
        self.runner = Runner(self.model, store, rule, self.noise, raw, measurer(device))
        self.draft_length = config.num_speculative_tokens  # may be set anew between steps, 0 too
        self.pace = Pace()
        self.counts = Counts()
        self.draft_seconds = 0.0
        self.verify_seconds = 0.0
        self._tokenizer = tokenizer
        self.grammars = Grammars(tokenizer, shape.vocab_size, shape.eos_token_ids)
        self._live: dict[str, dict[int, Sequence]] = {}
        self._bad_words = lru_cache(KNOWN_WORDS)(self._bad_word_ids)  # once for all its prompts

    def add(self, request: Request) -> None:
        """Queue a request; its ``n`` samples become sequences of their own.

        Raises:
            RequestError: the prompt is empty, too long or not of this vocabulary, the id is in
                use, or stop strings are asked of a model without a tokenizer.
            MemoryBudgetError: the cache could never hold it.
        """
        self.enqueue(self.prepare(request))

    def enqueue(self, sequences: list[Sequence]) -> None:
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

    def prepare(self, request: Request) -> list[Sequence]:
        """The sequences of a request: its options checked, its grammar compiled.

        Touches nothing that a step does, so that another thread may call it meanwhile.

        Raises:
            RequestError: the prompt is empty, too long or not of this vocabulary, or an option
                does not fit this model.
        """
        self._check_request(request)
        prompt, params = request.prompt_token_ids, request.params
        law = self.law_of(request)
        keys: list[bytes] = []
        size = self.config.page_size
        extend_keys(keys, prompt, len(prompt) // size, size, request.cache_salt)
        written = self._tokenizer if request.detokenize or params.stop else None
        sequences = [
            Sequence(
                id=f"{request.id}/{i}",
                request=request,
                sample_index=i,
                text=Detokenizer(
                    written,
                    prompt,
                    params.stop or (),
                    params.include_stop_str_in_output,
                    params.skip_special_tokens,
                ),
                law=sequence_law(law, i),
                tokens=list(prompt),
            )
            for i in range(params.n)
        ]
        for sequence in sequences:
            sequence.keys += keys
        return sequences

    def _check_request(self, request: Request) -> None:
        """Refuse what does not fit this model and this configuration.

        Raises:
            RequestError: something does not.
        """
        prompt, params = request.prompt_token_ids, request.params
        if not prompt:
            raise RequestError("the prompt has no tokens; give at least one.")
        if len(prompt) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, which leaves no room in a context of "
                f"{self.max_model_len}; shorten it to {self.max_model_len - 1} or less."
            )
        vocabulary = self.model.shape.vocab_size
        check_vocabulary("the prompt", prompt, vocabulary)
        check_vocabulary("prediction", request.speculation.prediction, vocabulary)
        # Nobody chose the default, so that a smaller context clips it.
        if (params.max_tokens or 0) > max(self.max_model_len, DEFAULT_MAX_TOKENS):
            raise RequestError(
                f"max_tokens is {params.max_tokens}, but the context of this model is "
                f"{self.max_model_len} tokens; give at most that."
            )
        if request.priority and self.config.scheduling_policy != "priority":
            raise RequestError(
                f"priority is {request.priority}, but priority scheduling is not enabled; give 0, "
                "or set scheduling_policy to 'priority'."
            )
        if self._tokenizer is None and (params.stop or params.bad_words):
            name = "stop strings" if params.stop else "bad_words"
            raise RequestError(f"{name} need a tokenizer, and this model has none.")

    def law_of(self, request: Request) -> RequestLaw:
        """What the options of a request make of the target's logits.

        Raises:
            RequestError: an option does not fit this model, or cannot be met.
        """
        params, vocabulary = request.params, self.model.shape.vocab_size
        words, grammar = (
            self._bad_words(tuple(params.bad_words or ())),
            self.grammars.compile(params),
        )
        return RequestLaw(request, vocabulary, self.model.device, words, grammar)

    def _bad_word_ids(self, words: tuple[str, ...]) -> list[list[int]]:
        """The ids of every bad word: as a word that follows a space, and as it begins a text.

        Written after a space only where that is one token sequence as long, as vLLM does.
        """
        found: list[list[int]] = []
        for word in words:
            assert self._tokenizer is not None
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
        for sequence in self._live.pop(request_id, {}).values():
            self.scheduler.remove(sequence)
            self._forget(sequence)

    @property
    def has_work(self) -> bool:
        """True while any sequence waits or runs."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def step(self) -> list[Event]:
        """Schedule, draft, verify, commit; return what was emitted."""
        drafter = self.drafter
        length = min(self.draft_length, drafter.max_length)
        chunk = self.pace.chunk(self.config.max_num_batched_tokens)
        plan = self.scheduler.schedule(length, drafter.max_nodes, chunk)
        for sequence in plan.preempted:
            self._forget(sequence)
        if not plan.batch:
            return []
        begin = time.perf_counter()
        draft = self._fitted(plan, self._proposed(plan))
        drafted = time.perf_counter()
        verdict = self.runner.verify(plan, draft)
        self.draft_seconds += drafted - begin
        done = time.perf_counter()
        self.verify_seconds += done - drafted
        rows = sum(item.count for item in plan.batch)
        decoding = sum(item.samples and item.count == 1 for item in plan.batch)
        self.pace.observe(rows, decoding, done - begin)
        events = self.scheduler.commit(plan, draft, verdict)
        drafter.observe(plan.batch, verdict)
        return [self._closed(e) if e.finish_reason is not None else e for e in events]

    def _proposed(self, plan: Plan) -> Draft:
        """The drafter's draft; none where it raises, since no output depends on it.

        Raises:
            RequestError: a drafter that watches (see ``audit``) refuses what it sees.
        """
        try:
            return self.drafter.propose(plan.batch, plan.lengths, self.draft_noise)
        except RequestError:
            raise
        except Exception:
            logger.exception("drafter %s failed, so that this step has no draft", self.drafter.name)
        for item in plan.batch:
            self.drafter.release(item.sequence.id)  # its state may be half made
        return Draft.chains([[] for _ in plan.batch])

    @staticmethod
    def _fitted(plan: Plan, draft: Draft) -> Draft:
        """The draft as grammars have it; drawn from laws, it is so already."""
        if draft.laws is not None:
            return draft
        for i, item in enumerate(plan.batch):
            if item.length and item.sequence.request.params.structured_outputs is not None:
                try:
                    draft.tokens[i], draft.parents[i] = item.sequence.law.fit(
                        item.sequence.tokens, draft.tokens[i], draft.parents[i], item.length
                    )
                except Exception:  # the target will meet it too, and say so
                    draft.tokens[i], draft.parents[i] = [], []
        return draft

    def _closed(self, event: Event) -> Event:
        """Let go of the sample that ``event`` ends; the event takes its counts along."""
        samples = self._live[event.request_id]
        done = samples.pop(event.sample_index)
        if not samples:
            del self._live[event.request_id]
        self.counts.add(done.counts)
        self._forget(done)
        return event._replace(counts=done.counts)

    def _forget(self, sequence: Sequence) -> None:
        self.drafter.release(sequence.id)
        self.runner.store.release(sequence.id)
        self.noise.release(sequence.id)

    def check(self) -> None:
        """Assert that every page in use belongs to a live sequence."""
        self.scheduler.pool.check([s.pages for s in self.scheduler.sequences()])
