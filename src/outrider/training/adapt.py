"""Adapts a drafter to a domain: makes data, trains on more and more of it, and judges the result.

Acceptance is measured in the serving engine, before and after: on held-out prompts of the domain,
and on general ones, which show what is forgotten.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from ..base.alone import alone
from ..bench.load.datasets import load_prompts
from ..bench.machine import machine
from ..checkpoints.checkpoint import open_checkpoint
from ..checkpoints.files import new_folder
from ..checkpoints.folders import find_folder
from ..checkpoints.heads import Head, read_head
from ..checkpoints.tokenizers import read_codec
from ..drafters.model import ModelSpec
from ..engine.setup import set_up
from ..errors import ConfigError, RequestError
from ..text.codec import TextCodec
from .data import DataOptions, make_data
from .measure import note
from .needs import check_adapting
from .plan import LEAST_MINUTES, Plan
from .run_distill import DistillOptions, train_drafter, usual_rate
from .run_heads import BATCH as HEAD_BATCH
from .run_heads import WORK, HeadOptions, train_head
from .samples import DataFolder
from .served import MOST_PROMPTS, Served, Serving, error_of_mean, held_out_prompts
from .targets import open_target

DATA, ADAPTED = "data", "drafter"
"""Folders inside that of an adaptation: the target's answers, and the result."""
SHARES = (0.1, 0.3, 1.0)
"""Shares of the data that a drafter is trained on in turn, which shows how much is enough."""
FEWEST_HELD_OUT = 4
MEASURED_TOKENS = 128
"""Most tokens of an output that acceptance is measured on."""
GENERAL = ("chat", "prose", "edit")
"""Bundled workloads, whose prompts show what is forgotten."""
GOOD_RATE = 0.60
"""Acceptance rate at temperature 0 from which a drafter is good enough, however fast it is."""
MOST_FORGOTTEN = 0.02
"""Share of the acceptance length on general prompts that may be lost."""
HEAD_RATE = 2e-4
"""The lowest learning rate that is tried for heads."""
MULTIPLES = (1, 5, 25)
"""Multiples of the lowest learning rate, which are tried on the first share of the data."""
HOPELESS = 0.01
"""Training stops if the intervals of all gains lie below this gain."""


@dataclass(frozen=True, kw_only=True)
class AdaptOptions:
    """The options of an adaptation: data, training, and how acceptance is measured.

    Without a learning ``rate`` several are tried on the first share of the data.
    """

    data: DataOptions
    plan: Plan
    rate: float | None = None
    head: HeadOptions = field(default_factory=HeadOptions)
    model: DistillOptions = field(default_factory=DistillOptions)
    length: int = 4
    temperatures: tuple[float, ...] = (0.0, 1.0)

    def __post_init__(self) -> None:
        if self.rate is not None:
            replace(self.plan, rate=self.rate)  # refuses a wrong one


class Gain(NamedTuple):
    """The relative gain of acceptance length over prompts, with its 95 % interval."""

    gain: float
    low: float
    high: float


class Point(NamedTuple):
    """The results of a drafter trained on a share of the data, 0 for the drafter before training.

    ``domain`` and ``general`` have an entry for each temperature. ``gain`` and ``kept`` are their
    gains over the drafter before training, at all temperatures. ``rate`` is the learning rate.
    """

    rate: float
    share: float
    samples: int
    said: int
    domain: list[Served]
    general: list[Served]
    gain: Gain
    kept: Gain

    @property
    def merit(self) -> tuple[bool, float]:
        """Whether little is forgotten, then the gain on the domain; larger is better."""
        return self.kept.gain >= -MOST_FORGOTTEN, self.gain.gain


class Verdict(NamedTuple):
    """Whether to deploy the adapted drafter, and the reason in a sentence."""

    deploy: bool
    why: str


def gain_of(before: Sequence[Served], after: Sequence[Served]) -> Gain:
    """Return the mean relative gain of acceptance length over prompts."""
    old = [length for each in before for length in each.lengths]
    new = [length for each in after for length in each.lengths]
    ratios = [b / a - 1 for a, b in zip(old, new, strict=True)]
    near = error_of_mean(ratios)
    return Gain(mean(ratios), mean(ratios) - near, mean(ratios) + near)


def judge(best: Point) -> Verdict:
    """Return whether a drafter should replace the one that its training began with."""
    gain, kept, greedy = best.gain, best.kept, best.domain[0]
    if gain.low <= 0:
        return Verdict(
            False,
            f"no gain: {gain.gain:+.1%} [{gain.low:+.1%} {gain.high:+.1%}] on the domain; keep the "
            "drafter, or give more prompts.",
        )
    if kept.gain < -MOST_FORGOTTEN:
        return Verdict(
            False,
            f"it forgets: {kept.gain:+.1%} on general prompts, more than {MOST_FORGOTTEN:.0%}; mix "
            "general prompts into those of the domain.",
        )
    if greedy.acceptance_rate < GOOD_RATE and greedy.speedup <= 1:
        return Verdict(
            False,
            f"better, but not good: at T = 0 {greedy.acceptance_rate:.0%} of the drafted tokens "
            f"are accepted, and decoding is {greedy.speedup:.2f} times as fast as plain; give more "
            "prompts.",
        )
    return Verdict(
        True,
        f"deploy it: {gain.gain:+.1%} [{gain.low:+.1%} {gain.high:+.1%}] on the domain, "
        f"{kept.gain:+.1%} on general ones; at T = 0 {greedy.speedup:.2f} times as fast as plain.",
    )


class Course:
    """The trainings of one adaptation, each compared with the drafter that it begins with.

    Raises ConfigError: there are too few prompts to measure on.
    """

    def __init__(
        self, target: Path, begin: Path, head: Head | None, out: Path, data: DataFolder,
        options: AdaptOptions, told: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._target, self._begin, self._head, self._out = target, begin, head, out
        self._data, self._options, self._told = data, options, told
        self._samples, context = data.read(), data.about.context
        if len(self._samples.held_out) < FEWEST_HELD_OUT:
            raise ConfigError(
                f"{data.done} prompts are too few to hold some out for measuring; give 200 or more."
            )
        self._opened, most = open_target(target, data), context - MEASURED_TOKENS
        general = [ids for ids in _general(read_codec(target)) if len(ids) < most][:MOST_PROMPTS]
        self._domain, self._general = (
            Serving(target, self._opened.model, prompts, MEASURED_TOKENS, context)
            for prompts in (held_out_prompts(self._samples, most), general)
        )
        if min(len(self._domain.prompts), len(self._general.prompts)) < 2:
            raise ConfigError(f"hardly any prompt has less than {most} tokens; raise the context.")
        told("measuring acceptance before")
        self._before = self._measured(begin)

    @property
    def first(self) -> Point:
        """The results of the drafter before training."""
        none = Gain(0.0, 0.0, 0.0)
        domain, general = self._before
        return Point(0.0, 0.0, 0, 0, domain, general, none, none)

    def trained(self, rate: float, share: float, minutes: float | None) -> Point:
        """Train on a share of the data, for ``minutes`` if given; return the results."""
        self._told(f"training on {share:.0%} of the data, learning rate {rate:g}")
        place = place_of(self._out, rate, share)
        plan = replace(self._options.plan, rate=rate, minutes=minutes)
        where = self._target, self._data, self._begin, place, plan
        if self._head is None:
            train_drafter(*where, replace(self._options.model, share=share), self._opened)
        else:
            own = replace(self._options.head, share=share)
            train_head(self._head.kind, *where, own, self._opened)
        self._told("measuring acceptance after it")
        (domain, general), some = self._measured(place), self._samples.share(share)
        gain, kept = (gain_of(a, b) for a, b in zip(self._before, (domain, general), strict=True))
        return Point(rate, share, len(some.train), some.said, domain, general, gain, kept)

    def _measured(self, drafter: Path) -> tuple[list[Served], list[Served]]:
        """Return a drafter's figures on prompts of the domain and on general ones."""
        how = drafter, self._options.length, self._options.temperatures
        return self._domain.measure(*how), self._general.measure(*how)


def adapt(
    target: str, drafter: str, out: Path, options: AdaptOptions, told: Callable[[str], None]
) -> dict[str, Any]:
    """Adapt a head or a small model to a domain's prompts, and return the report.

    The best drafter is written to ``out``/drafter. ``told`` is called with what is being done.
    Raises ConfigError: too few prompts to hold some out, something else in the drafter's place, or
    another adaptation in ``out``.
    """
    with alone(out):
        return _adapted(target, drafter, out, options, told)


def _adapted(
    target: str, drafter: str, out: Path, options: AdaptOptions, told: Callable[[str], None]
) -> dict[str, Any]:
    """Adapt a drafter in a folder that no other adaptation writes, and return the report."""
    folder, begin, adapted = find_folder(target), find_folder(drafter), out / ADAPTED
    _check_place(begin, adapted)
    set_up(folder, begin, {})  # refuses a drafter of another tokenizer before there is data
    head = read_head(begin)
    if head is not None:
        options = replace(options, plan=replace(options.plan, batch=HEAD_BATCH))
    least = usual_rate(begin, options.model.rank) if head is None else HEAD_RATE
    rates = [least * each for each in MULTIPLES] if options.rate is None else [options.rate]
    shares = [*SHARES[:1] * len(rates), *SHARES[1:]]
    checkpoint = open_checkpoint(folder)
    check_adapting(
        checkpoint, begin, head, out, options.plan, options.data, options.head.depth,
        options.model.rank, len(shares),
    )  # fmt: skip

    def answered(done: int, total: int) -> None:
        told(f"the target answers the prompts: {done} of {total}")

    a = checkpoint.architecture
    count = 0 if a is None else a.num_layers
    wanted = (count - 1,) if head is None else head.target_layers(count)  # by the drafter
    data = make_data(target, out / DATA, options.data, answered, told, wanted)
    course = Course(folder, begin, head, out, data, options, told)
    minutes = options.plan.minutes

    def trained(rate: float, share: float) -> Point:
        part = None if minutes is None else max(LEAST_MINUTES, minutes * share / sum(shares))
        return course.trained(rate, share, part)

    tried = [trained(rate, SHARES[0]) for rate in rates]
    points = [course.first, max(tried, key=lambda point: point.merit)]
    for share in SHARES[1:]:
        points.append(trained(points[1].rate, share))
        if all(point.gain.high < HOPELESS for point in points[1:]):
            break
    best = max(points[1:], key=lambda point: point.merit)
    place = place_of(out, best.rate, best.share)
    if adapted.exists():  # of an earlier run
        shutil.rmtree(adapted)
    with new_folder(adapted) as filling:
        shutil.copytree(place, filling, ignore=shutil.ignore_patterns(WORK), dirs_exist_ok=True)
    for use, served in (("domain", best.domain), ("general", best.general)):
        note(adapted, use, served, data.about.prompts, f"{use} prompts of its adaptation")
    return {
        "machine": machine(), "target": str(folder), "drafter": str(begin),
        "kind": ModelSpec.name if head is None else head.kind,
        "prompts": str(options.data.prompts), "num_speculative_tokens": options.length,
        "points": [as_dict(point) for point in points], "best_share": best.share,
        "rates": [as_dict(point) for point in tried],
        "verdict": judge(best)._asdict(), "adapted": str(adapted),
    }  # fmt: skip


def _check_place(begin: Path, adapted: Path) -> None:
    """Raise ConfigError if the result would replace something else."""
    out = adapted.parent
    if begin.resolve().is_relative_to(out.resolve()):
        raise ConfigError(f"{begin} lies in {out}, whose drafter is replaced; give another --out.")
    if adapted.is_symlink() or (adapted.exists() and not (out / DATA).exists()):
        raise ConfigError(f"{adapted} is none that was adapted here; give another --out.")


def place_of(out: Path, rate: float, share: float) -> Path:
    """Return the folder of the drafter trained at a learning rate on a share of the data."""
    return out / f"share-{share:g}-rate-{rate:g}"


def as_dict(point: Point) -> dict[str, Any]:
    """Return a point for the report."""
    return {
        **point._asdict(),
        "domain": [each._asdict() for each in point.domain],
        "general": [each._asdict() for each in point.general],
        "gain": point.gain._asdict(),
        "kept": point.kept._asdict(),
    }


def _general(codec: TextCodec) -> list[list[int]]:
    """Return the ids of the bundled general prompts, without chats if there is no template."""
    prompts: list[list[int]] = []
    for item in (item for name in GENERAL for item in load_prompts(name).items):
        with suppress(RequestError):  # a model without a template cannot chat
            prompts.append(item.encode(codec))
    return prompts
