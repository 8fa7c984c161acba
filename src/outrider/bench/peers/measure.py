"""Our engine against others: the best settings of each side, then interleaved rounds of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import ConfigError, OutriderError
from ..offline import available_cores
from .known import MODES, OWN, Peer, converted
from .pairs import Pair
from .session import Answer, PeerError, Pool, Session
from .setup import home, say

LENGTHS = (2, 4, 6, 8)
CHECKED_TOKENS = 32


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Args:
        dtypes: see ``known.DTYPES``.
        rounds: how often each side's best settings are run, 1 or more.
        max_tokens: output tokens of each prompt, 2 or more.
        temperature: 0 or above.
        lengths: draft lengths K that the search tries.
        threads: thread counts that it tries; 1 and all cores unless given.

    Raises:
        ConfigError: a value is out of its range.
    """

    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    rounds: int = 7
    max_tokens: int = 128
    temperature: float = 0.0
    lengths: tuple[int, ...] = LENGTHS
    threads: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("rounds", 1), ("max_tokens", 2), ("temperature", 0)):
            value = getattr(self, name)
            if not value >= least:
                raise ConfigError(f"{name} is {value}; give {least} or more.")


@dataclass(frozen=True)
class Engine:
    """A peer in one dtype and mode: what one process serves."""

    peer: str
    dtype: str
    mode: str


@dataclass(frozen=True)
class Setting:
    """An engine, its draft length (0 where it drafts nothing) and its threads."""

    engine: Engine
    k: int
    threads: int


@dataclass
class Trial:
    """A setting over all prompts once, and its decode speed (N-1)/(T(N)-T(1)), tokens/s."""

    answers: list[Answer]

    @property
    def speed(self) -> float:
        tokens = sum(len(a.ids) - 1 for a in self.answers)
        return tokens / max(sum(a.seconds - a.first for a in self.answers), 1e-9)

    @property
    def end_to_end(self) -> float:
        """Output tokens a second from the call on."""
        return sum(len(a.ids) for a in self.answers) / sum(a.seconds for a in self.answers)

    @property
    def ttft(self) -> float:
        """T(1), s: the mean of the prompts."""
        return sum(a.first for a in self.answers) / len(self.answers)

    @property
    def others(self) -> float | None:
        """Cores that other processes used, the most of any prompt."""
        known = [a.others for a in self.answers if a.others is not None]
        return max(known) if known else None

    @property
    def outputs(self) -> list[list[int]]:
        return [a.ids for a in self.answers]


@dataclass(frozen=True)
class Skipped:
    """What was not measured, and why; ``dtype`` and ``mode`` are None where all are meant."""

    peer: str
    dtype: str | None
    mode: str | None
    reason: str


@dataclass
class Found:
    """Everything measured.

    ``search`` has every setting's speed on the first prompt (tokens/s), ``rounds`` a trial a round
    for those that were best.
    """

    search: dict[Setting, Trial] = field(default_factory=dict)
    rounds: dict[Setting, list[Trial]] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)


class Bench:
    """One run: sessions of all sides, the search, the rounds.

    Args:
        pair: what to run, and the prompts.
        sides: the peers; Outrider must be among them, as conversions are checked against it.
        options: how to measure.
    """

    def __init__(self, pair: Pair, sides: list[Peer], options: Options) -> None:
        self.pair, self.options = pair, options
        self.sides = {peer.name: peer for peer in sides}
        self.threads = options.threads or tuple(dict.fromkeys((1, available_cores())))
        self.found = Found()
        self.pool: Pool[Engine] = Pool(self._open, self._need)

    def run(self, progress: Callable[[str], None] = say) -> Found:
        """Measure all dtypes, one after the other; ``progress`` is told what is going on."""
        try:
            usable = [p for p in self.sides.values() if self._usable(p)]
            for dtype in self.options.dtypes:
                self._run(dtype, usable, progress)
                self.pool.close()
        finally:
            self.pool.close()
        return self.found

    def _run(self, dtype: str, peers: list[Peer], progress: Callable[[str], None]) -> None:
        best: list[Setting] = []
        for peer in peers:
            for mode in MODES:
                progress(f"{dtype}: looking for the best settings of {peer.name}, {mode}")
                setting = self._search(Engine(peer.name, dtype, mode), peer)
                if setting is not None:
                    best.append(setting)
        chosen = self._finalists(best)
        kept = {setting.engine for setting in chosen}
        for engine in list(self.pool.sessions):
            if engine not in kept:
                self.pool.drop(engine)
        for number in range(self.options.rounds):
            progress(f"{dtype}: round {number + 1} of {self.options.rounds}")
            # Turned on by one place a round, so that nobody always runs after the same other.
            turned = number % max(len(chosen), 1)
            for setting in chosen[turned:] + chosen[:turned]:
                self._measure(setting)

    def _usable(self, peer: Peer) -> bool:
        """True if it is installed and its conversion right; what is not goes on the list."""
        reason = peer.missing()
        if reason is None and peer.converter is not None:
            try:
                reason = self._wrong_conversion(peer)
            except OutriderError as error:
                reason = str(error)
        if reason is not None:
            self._skip(Skipped(peer.name, None, None, reason))
        return reason is None

    def _wrong_conversion(self, peer: Peer) -> str | None:
        """A sentence if the converted target's greedy fp32 ids are not ours; checked once."""
        note = converted(self.pair.target) / f"{peer.name}-checked.json"
        if not note.exists():
            outputs = []
            for name in (OWN, peer.name):
                engine = Engine(name, "float32", "plain")
                setting = Setting(engine, 0, available_cores())
                outputs.append(self._trial(setting, self.pair.prompts, CHECKED_TOKENS, 0.0).outputs)
                self.pool.drop(engine)
            parted = first_difference(*outputs)
            note.write_text(json.dumps({"parted": parted}), encoding="utf-8")
        parted = json.loads(note.read_text(encoding="utf-8"))["parted"]
        if parted is None:
            return None
        parting = f"its greedy float32 ids part from Outrider's at token {parted}"
        return f"{parting}: the conversion is wrong"

    def _search(self, engine: Engine, peer: Peer) -> Setting | None:
        """The fastest setting on the first prompt; None if the engine cannot run."""
        if engine.dtype not in peer.dtypes:
            if engine.mode == "plain":
                self._skip(Skipped(peer.name, engine.dtype, None, "it has no such weights"))
            return None
        if engine.mode == "draft" and self.pair.drafter is None:
            return None
        lengths = (0,) if engine.mode == "plain" else self.options.lengths
        tried: dict[Setting, Trial] = {}
        reason = ""
        for threads in self.threads:
            # A setting that fails, even by a crash, must not cost the others of its mode.
            try:
                for k in lengths:
                    setting = Setting(engine, k, threads)
                    tried[setting] = self._trial(setting, self.pair.prompts[:1])
            except OutriderError as error:
                reason = str(error)
                say(f"{engine.peer} {engine.dtype} {engine.mode}, {threads} threads: {reason}")
                self.pool.drop(engine)
        if not tried:
            self._skip(Skipped(engine.peer, engine.dtype, engine.mode, reason))
            return None
        self.found.search.update(tried)
        return max(tried, key=lambda setting: tried[setting].speed)

    def _finalists(self, best: list[Setting]) -> list[Setting]:
        """Each side's plain setting, and that of its faster speculative mode."""
        chosen: list[Setting] = []
        for name in self.sides:
            mine = [s for s in best if s.engine.peer == name]
            chosen += [s for s in mine if s.engine.mode == "plain"]
            drafting = [s for s in mine if s.engine.mode != "plain"]
            if drafting:
                chosen.append(max(drafting, key=lambda s: self.found.search[s].speed))
        return chosen

    def _measure(self, setting: Setting) -> None:
        """One trial of a round; a setting that fails is not run again and says so."""
        trials = self.found.rounds.setdefault(setting, [])
        engine = setting.engine
        if any((s.peer, s.dtype, s.mode) == (engine.peer, engine.dtype, engine.mode)
               for s in self.found.skipped):  # fmt: skip
            return
        try:
            trials.append(self._trial(setting, self.pair.prompts))
        except OutriderError as error:
            self._skip(Skipped(engine.peer, engine.dtype, engine.mode, str(error)))
            self.pool.drop(engine)

    def _trial(
        self,
        setting: Setting,
        prompts: list[list[int]],
        max_tokens: int | None = None,
        temperature: float | None = None,
    ) -> Trial:
        """Run a setting over prompts, after an untimed run wherever it was not run last."""
        session, fresh = self.pool.get(setting.engine)
        request: dict[str, Any] = {
            "max_tokens": self.options.max_tokens if max_tokens is None else max_tokens,
            "temperature": self.options.temperature if temperature is None else temperature,
            "k": setting.k,
            "threads": setting.threads,
        }
        if fresh or session.setting != setting:
            session.run(prompt=prompts[0], seed=0, **request)
            session.setting = setting
        trial = Trial([session.run(prompt=p, seed=i, **request) for i, p in enumerate(prompts)])
        wrong = [len(a.ids) for a in trial.answers if len(a.ids) != request["max_tokens"]]
        if wrong:
            raise PeerError(f"it gave {wrong[0]} tokens, not {request['max_tokens']}")
        return trial

    def _open(self, engine: Engine) -> Session:
        peer = self.sides[engine.peer]
        target, drafter = self.pair.target, self.pair.drafter
        spec = {
            "target": str(peer.convert(target, engine.dtype)),
            "drafter": str(peer.convert(drafter, engine.dtype)) if drafter else None,
            "dtype": engine.dtype,
            "mode": engine.mode,
            "context": max(map(len, self.pair.prompts))
            + max(self.options.max_tokens, CHECKED_TOKENS),
        }
        log = home() / "logs" / f"{engine.peer}-{engine.dtype}-{engine.mode}.log"
        session = Session(peer.command, spec, log, peer.variables())
        self.found.versions[engine.peer] = session.version
        return session

    def _need(self, engine: Engine) -> int:
        """Bytes that an engine will take, guessed from its checkpoints' size in bfloat16."""
        folders = [self.pair.target, *([self.pair.drafter] if self.pair.drafter else [])]
        files = [file for folder in folders for file in Path(folder).glob("*.safetensors")]
        weights = sum(file.stat().st_size for file in files)
        return weights * (3 if engine.dtype == "float32" else 2) + (1 << 30)

    def _skip(self, skipped: Skipped) -> None:
        self.found.skipped.append(skipped)
        which = " ".join(part for part in (skipped.dtype, skipped.mode) if part)
        say(f"{skipped.peer}{' ' if which else ''}{which}: skipped: {skipped.reason}")


def first_difference(left: list[list[int]], right: list[list[int]]) -> int | None:
    """The least index at which two lists of outputs differ, None if they are the same."""
    found = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), min(len(x), len(y)))
        for x, y in zip(left, right, strict=True)
        if x != y
    ]
    return min(found) if found else None
