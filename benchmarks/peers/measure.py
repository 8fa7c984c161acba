"""Our engine against others: the best settings of each side, then interleaved rounds of them."""

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

from outrider.bench.machine import available_cores
from outrider.bench.offline import turned
from outrider.errors import OutriderError

from ..install import home, say
from .known import OWN, PEAKS, Peer, weight_files
from .pairs import Pair
from .session import PeerError, Pool, Session, peak_rate, read_bandwidth
from .settings import DECODE, EVERY, KINDS, Load, Options, Setting, Trial

CHECKED_TOKENS = 32
SEARCHED_TOKENS = {"decode": 32, "batch": 16, "prefill": 1}
WARM_TOKENS = 16


class Bench:
    """One run over a pair: sessions of all sides, the search, the rounds.

    Outrider must be among the sides, as conversions are checked against it. ``search`` has every
    setting tried, ``failures`` why others failed, ``rounds`` a trial a round for those that were
    best, ``servers`` what ``Serving`` measured, ``skipped`` what was not measured and why (None:
    all of it). ``bits`` are the bits per weight by peer and dtype (None: unknown), ``conversions``
    the peers whose conversion was checked, and whether that was now. ``bandwidth`` is how many
    bytes a second memory was read at, before each round of a load but "prefill", ``peaks`` how many
    products a second the cores could do, before those of a load but "decode".
    """

    def __init__(self, pair: Pair, sides: list[Peer], options: Options) -> None:
        self.pair, self.options = pair, options
        self.sides = {peer.name: peer for peer in sides}
        self.threads = options.threads or tuple(dict.fromkeys((available_cores(), 1)))
        self.search: dict[Setting, Trial] = {}
        self.failures: dict[Setting, str] = {}
        self.rounds: dict[Setting, list[Trial]] = {}
        self.skipped: list[dict[str, str | None]] = []
        self.versions: dict[str, str] = {}
        self.servers: list[dict[str, Any]] = []
        self.bits: dict[tuple[str, str], float | None] = {}
        self.conversions: dict[str, bool] = {}
        self.bandwidth: dict[tuple[str, Load], list[float | None]] = defaultdict(list)
        self.peaks: dict[tuple[str, Load], list[float | None]] = defaultdict(list)
        self.pool: Pool[Setting] = Pool(self._open, self._need)

    def run(self, after: Callable[[], None] = lambda: None) -> None:
        """Measure all dtypes, one after the other; ``after`` is called behind every load."""
        try:
            usable = [peer for peer in self.sides.values() if self._usable(peer)]
            for dtype in self.options.dtypes:
                able = [peer for peer in usable if self._has(peer, dtype)]
                for load in self.options.loads:
                    for peer in able:
                        say(f"{dtype}, {load.name}: looking for the best settings of {peer.name}")
                        self._search(peer, dtype, load)
                    self._run_rounds(dtype, load)
                    after()
                self.pool.close()
        finally:
            self.pool.close()

    def _usable(self, peer: Peer) -> bool:
        try:
            reason = peer.missing() or self._wrong_conversion(peer)
        except OutriderError as error:
            reason = str(error)
        if reason is not None:
            self.skip(reason, peer.name)
        return reason is None

    def _wrong_conversion(self, peer: Peer) -> str | None:
        """Return a sentence if a converted target's greedy fp32 ids are not ours; checked once."""
        if peer.converter is None or self.pair.is_file:
            return None
        note = peer.conversions(self.pair.target) / "checked.json"
        self.conversions[peer.name] = not note.exists()
        if note.exists():
            say(f"{peer.name}: its conversion was checked before; delete {note} to check it again")
        else:
            outputs = []
            for name in (OWN, peer.name):
                setting = Setting(name, "float32", "plain", DECODE, 0, available_cores())
                outputs.append(self._trial(setting, CHECKED_TOKENS, temperature=0.0).outputs)
                self.pool.close()
            note.write_text(json.dumps({"parted": first_difference(*outputs)}), encoding="utf-8")
        at = json.loads(note.read_text(encoding="utf-8"))["parted"]
        if at is None:
            return None
        return f"its greedy float32 ids part from Outrider's at token {at}: the conversion is wrong"

    def _has(self, peer: Peer, dtype: str) -> bool:
        if peer.form(dtype) not in peer.dtypes:
            self.skip("it has no such weights", peer.name, dtype)
            return False
        return True

    def _search(self, peer: Peer, dtype: str, load: Load) -> None:
        """Run shortly every K with all threads, then the best with fewer; skip a mode with none.

        Processes of what was best so far stay, to be used in the rounds.
        """
        modes = [m for m in peer.modes(dtype) if m.partition(" ")[0] in self.options.modes]
        modes = [m for m in modes if self.pair.drafter or not m.startswith("draft")]
        first, *fewer = self.threads if peer.threads else (available_cores(),)
        variants = peer.variants
        if load.kind == "batch" and not peer.batches:
            reason = "it is measured with one request at a time"
            self.skip(reason, peer.name, dtype, None, load.name)
            return
        for mode in ["plain"] if load.kind == "prefill" else modes:
            lengths = (0,) if mode in ("plain", "auto") else self.options.lengths
            settings = [
                Setting(peer.name, dtype, mode, load, k, first, variant)
                for k, variant in product(lengths, variants)
            ]
            tried = [setting for setting in settings if self._try(setting)]
            if not tried:
                reason = self.failures[settings[0]]
                self.skip(reason, peer.name, dtype, mode, load.name)
                continue
            best = max(tried, key=lambda s: self.search[s].speed)
            variants = (best.variant,)  # the first mode decides
            for threads in fewer:
                self._try(replace(best, threads=threads))

    def _try(self, setting: Setting) -> bool:
        """Run a setting shortly; return False where it failed, even by a crash."""
        tokens = min(self.options.tokens(setting.load), SEARCHED_TOKENS[setting.load.kind])
        try:
            self.search[setting] = self._trial(setting, tokens, 1)
        except OutriderError as error:
            self.failures[setting] = str(error)
            say(f"{setting}: {error}")
        if setting in self.failures:
            self.pool.drop(self._process(setting))
        self._close_others(self._finalists(setting.dtype, setting.load))
        return setting in self.search

    def _run_rounds(self, dtype: str, load: Load) -> None:
        """Run each side's best settings by turns; one that fails is left out from then on."""
        chosen = self._finalists(dtype, load)
        self._close_others(chosen)
        for number in range(self.options.rounds):
            say(f"{dtype}, {load.name}: round {number + 1} of {self.options.rounds}")
            if load.kind != "prefill":
                self.bandwidth[dtype, load].append(read_bandwidth())
            if load != DECODE:
                self.peaks[dtype, load].append(peak_rate(PEAKS[dtype], self.options.isa))
            for setting in turned(chosen, number):  # nobody always runs after the same other
                try:
                    trial = self._trial(setting, self.options.tokens(load), first=number == 0)
                    self.rounds.setdefault(setting, []).append(trial)
                except OutriderError as error:
                    self.skip(str(error), setting.peer, dtype, setting.mode, load.name)
                    self.pool.drop(self._process(setting))
                    chosen.remove(setting)
        self._close_others([])

    def _close_others(self, kept: list[Setting]) -> None:
        best = {self._process(setting) for setting in kept}
        for process in [each for each in self.pool.sessions if each not in best]:
            if process.load != EVERY:
                self.pool.drop(process)

    def _finalists(self, dtype: str, load: Load) -> list[Setting]:
        slowest_first = sorted(self.search, key=lambda setting: self.search[setting].speed)
        best = {(s.peer, s.kind): s for s in slowest_first if (s.dtype, s.load) == (dtype, load)}
        return [best[key] for key in product(self.sides, KINDS) if key in best]

    def _trial(
        self,
        setting: Setting,
        count: int,
        calls: int | None = None,
        temperature: float | None = None,
        first: bool = False,
    ) -> Trial:
        """Run a setting, after an untimed run in a new process.

        ``calls`` limits the prompts run one by one. Under the load "batch" T(1) is measured only if
        it is the ``first`` of the rounds.
        """
        batches = self.prompts(setting.load)
        heat = self.options.temperature if temperature is None else temperature
        once = setting.load.kind == "batch" and not first
        process = self._process(setting)
        new = process not in self.pool.sessions
        session = self.pool.get(process)
        if new:
            session.run(batches[0], min(count, WARM_TOKENS), heat, 0, setting.k, once=True)
        answers = [
            session.run(prompts, count, heat, i, setting.k, once)
            for i, prompts in enumerate(batches[:calls])
        ]
        trial = Trial(setting.load, answers)
        if wrong := [len(ids) for ids in trial.outputs if len(ids) != count]:
            raise PeerError(f"it gave {wrong[0]} tokens, not {count}")
        return trial

    def _process(self, setting: Setting) -> Setting:
        """Return what its process is opened for: every load and length where one can serve all."""
        if self.sides[setting.peer].lengths:
            return replace(setting, load=EVERY, k=max(self.options.lengths) if setting.k else 0)
        return setting

    def prompts(self, load: Load) -> list[list[list[int]]]:
        """The prompts of a load, by call."""
        if load == EVERY:
            return [call for each in self.options.loads for call in self.prompts(each)]
        if load.kind == "prefill":
            return [[self.pair.long_prompt(load.size)]]
        prompts = [prompt[: self.options.prompt_tokens] for prompt in self.pair.prompts]
        if load.kind == "batch":
            return [prompts[: load.size]]
        return [[prompt] for prompt in prompts[: self.pair.single]]

    def _open(self, setting: Setting) -> Session:
        peer = self.sides[setting.peer]
        dtype = peer.form(setting.dtype)
        target, drafter = self.pair.target, self.pair.drafter
        mode, _, kind = setting.mode.partition(" ")
        coarse = kind if mode == "draft" else ""
        drafts = mode in ("draft", "auto")
        calls = self.prompts(setting.load)
        longest = max(len(prompt) for prompts in calls for prompt in prompts)
        spec = {
            "target": str(peer.convert(target, dtype)),
            "drafter": str(peer.convert(drafter, coarse or dtype)) if drafts and drafter else None,
            "dtype": dtype,
            "drafter_dtype": coarse or dtype,
            "mode": mode,
            "lookup": kind if mode == "ngram" else "",
            "k": setting.k,
            "threads": setting.threads,
            "arguments": setting.variant.split(),
            "context": longest + max(*map(self.options.tokens, self.options.loads), CHECKED_TOKENS),
            "parallel": max(map(len, calls)),
        }
        self.bits[peer.name, setting.dtype] = peer.bits_per_weight(target, dtype)
        log = home() / "logs" / f"{peer.name}-{setting.dtype}-{setting.mode}.log"
        session = Session(peer.command, spec, log, peer.variables())
        self.versions[peer.name] = session.version
        return session

    def _need(self, setting: Setting) -> int:
        """Bytes that a process will take, guessed from its checkpoints' size in bfloat16."""
        models = filter(None, (self.pair.target, self.pair.drafter))
        weights = sum(file.stat().st_size for model in models for file in weight_files(model))
        return weights * (3 if setting.dtype == "float32" else 2) + (1 << 30)

    def skip(
        self,
        reason: str,
        peer: str,
        dtype: str | None = None,
        mode: str | None = None,
        load: str | None = None,
    ) -> None:
        """Note that something is not measured, and why."""
        which = {"peer": peer, "dtype": dtype, "mode": mode, "load": load}
        self.skipped.append({**which, "reason": reason})
        say(f"{' '.join(filter(None, which.values()))}: skipped: {reason}")


def first_difference(left: list[list[int]], right: list[list[int]]) -> int | None:
    """The least index at which two lists of outputs differ, None if they are the same."""
    places = (
        next((i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), min(len(x), len(y)))
        for x, y in zip(left, right, strict=True)
        if x != y
    )
    return min(places, default=None)
