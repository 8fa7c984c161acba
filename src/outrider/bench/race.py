"""A race of settings: the fastest, with fewer runs than trying each of them often.

Under the coupled rule, long drafts show how shorter ones would have done, and a step's time is
interpolated between lengths that were run; so a few lengths predict the speed of every length.
Settings with a good prediction run in turns, and are dropped once others are surely faster.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, inf, log, sqrt
from statistics import fmean
from typing import NamedTuple

from ..base.types import Counts
from .intervals import student

PLAIN = "none"
SCREENED_LENGTHS = 4  # lengths of a drafter that are screened
SCREENINGS = 2  # runs of each setting that is screened
PROMISE_SLACK = 0.15  # how far below the best a raced setting's prediction may be, as a share
MOST_OF_A_DRAFTER = 3  # most lengths raced, so that no drafter crowds out the others
MOST_RACED = 6  # most settings that are raced, besides plain decoding
ALLOWED_LOSS = 0.03  # largest loss of the winner against any other at which the race ends
FEWEST_ROUNDS = 3  # runs of each setting before any is dropped
MOST_ROUNDS = 12  # most rounds of a race


class Setting(NamedTuple):
    """A drafter and the length of its drafts, 0 for none; ``nodes`` are those of a tree."""

    drafter: str = PLAIN
    length: int = 0
    nodes: int = 0

    def __str__(self) -> str:
        if not self.length:
            return "plain"
        return f"{self.drafter} K={self.length}" + (f", {self.nodes} nodes" if self.nodes else "")


class RaceRun(NamedTuple):
    """A pass over the prompts: decoded ``tokens``, the ``seconds`` that took, and draft counts."""

    tokens: int
    seconds: float
    counts: Counts

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


PLAIN_SETTING = Setting()


def promises(screened: Mapping[int, RaceRun], lengths: Sequence[int]) -> dict[int, float]:
    """Return the speed predicted for drafts of each length, in tokens per second.

    The longest of the ``screened`` runs, keyed by draft length, shows how long shorter drafts would
    be and how many of their tokens would be accepted.
    """
    known = sorted(screened)
    counts = screened[known[-1]].counts

    def drafted(length: int) -> float:
        return sum(min(d, length) * times for (d, _), times in counts.outcomes.items())

    promised: dict[int, float] = {}
    for length in lengths:
        after = next(each for each in known if each >= length)
        before = max((each for each in known if each < length), default=after)
        (near, far), wanted = (drafted(before), drafted(after)), drafted(length)
        share = (wanted - near) / (far - near) if far > near else 1.0
        first, last = (
            screened[each].seconds / screened[each].counts.steps for each in (before, after)
        )
        stand = sum(min(a, length) * times for (_, a), times in counts.outcomes.items())
        emitted = 1 + stand / counts.steps
        promised[length] = emitted / (first + share * (last - first))
    return promised


def sample(lengths: Sequence[int]) -> list[int]:
    """Return the lengths that are screened: the first, the last, and some in between."""
    count = min(SCREENED_LENGTHS, len(lengths))
    places = {round(i * (len(lengths) - 1) / max(1, count - 1)) for i in range(count)}
    return [lengths[place] for place in sorted(places)]


def merged(runs: Sequence[RaceRun]) -> RaceRun:
    """Return the runs of one setting merged into one."""
    counts = Counts()
    for each in runs:
        counts.add(each.counts)
    return RaceRun(sum(each.tokens for each in runs), sum(each.seconds for each in runs), counts)


def hopeful(promised: Mapping[Setting, float]) -> list[Setting]:
    """Return settings predicted to be nearly the fastest, the fastest first."""
    enough = (1 - PROMISE_SLACK) * max(promised.values())
    chosen: list[Setting] = []
    for each in sorted(promised, key=promised.__getitem__, reverse=True):
        alike = sum((s.drafter, s.nodes > 0) == (each.drafter, each.nodes > 0) for s in chosen)
        if each.length and promised[each] >= enough and alike < MOST_OF_A_DRAFTER:
            chosen.append(each)
    return chosen[:MOST_RACED]


@dataclass
class Race:
    """The runs of a race, and the results.

    ``loss`` bounds how much faster than the winner another setting of the race could be, as a
    share, with about 95 % confidence.
    """

    screened: dict[Setting, RaceRun] = field(default_factory=dict)  # all before the race
    promised: dict[Setting, float] = field(default_factory=dict)  # tokens per second, of every one
    runs: dict[Setting, list[RaceRun]] = field(default_factory=dict)  # of raced settings, by round
    contenders: list[Setting] = field(default_factory=list)  # plain decoding always is one
    loss: float = 1.0

    @property
    def winner(self) -> Setting:
        """The fastest contender."""
        return max(self.contenders, key=self.level)

    def level(self, setting: Setting) -> float:
        """Return the mean logarithm of a raced setting's speeds."""
        return fmean([log(run.speed) for run in self.runs[setting]])

    def margin(self) -> float:
        """Return how far apart the winner's and a rival's level may be by chance.

        The confidence is 95 % for all rivals together (Bonferroni). All contenders run in each
        round: the variance is that of the residuals once settings and rounds have their own means.
        """
        rows = [[log(run.speed) for run in self.runs[each]] for each in self.contenders]
        rounds, means = len(rows[0]), [fmean(row) for row in rows]
        all_mean, turns = fmean(means), [fmean(column) for column in zip(*rows, strict=True)]
        square = sum(
            (value - means[i] - turns[r] + all_mean) ** 2
            for i, row in enumerate(rows)
            for r, value in enumerate(row)
        )
        freedom = (len(rows) - 1) * (rounds - 1)
        rivals = max(1, len(self.runs) - 1)
        return student(freedom, rivals) * sqrt(2 * square / freedom / rounds) if freedom else inf

    def drop(self) -> None:
        """Drop the contenders that are surely slower than the winner, and update ``loss``."""
        best, margin = self.level(self.winner), self.margin()
        self.contenders = [
            each
            for each in self.contenders
            if each == PLAIN_SETTING or self.level(each) + margin >= best
        ]
        rivals = [self.level(each) for each in self.contenders if each != self.winner]
        self.loss = max(0.0, exp(max(rivals) + margin - best) - 1) if rivals else 0.0


def race(
    measure: Callable[[Setting, int], RaceRun],
    families: Mapping[str, Sequence[int]],
    others: Sequence[Setting] = (),
    rounds: int = MOST_ROUNDS,
    told: Callable[[int, int], None] = lambda done, total: None,
) -> Race:
    """Return the race of plain decoding, drafters with several lengths, and other settings.

    ``measure`` runs a setting in a round; rounds of the race count from 1, those of the screening
    end at 0. ``families`` are rising lengths by drafter; ``others`` are settings that no other run
    predicts. ``told`` is called with the number of finished runs, and its maximum.
    """
    result = Race()
    samples = [Setting(d, k) for d, lengths in families.items() for k in sample(lengths)]
    screened, runs = [PLAIN_SETTING, *others, *samples], list[tuple[Setting, RaceRun]]()
    most = len(screened) * SCREENINGS + rounds * (1 + MOST_RACED)
    for number in range(1 - SCREENINGS, 1):
        for setting in screened:
            runs.append((setting, measure(setting, number)))
            told(len(runs), most)
    result.screened = {each: merged([r for s, r in runs if s == each]) for each in screened}
    result.promised = {s: result.screened[s].speed for s in (PLAIN_SETTING, *others)}
    for drafter, lengths in families.items():
        own = {s.length: result.screened[s] for s in samples if s.drafter == drafter}
        for length, speed in promises(own, lengths).items():
            result.promised[Setting(drafter, length)] = speed
    result.contenders = [PLAIN_SETTING, *hopeful(result.promised)]
    result.runs = {each: [] for each in result.contenders}
    done = len(runs)
    for number in range(1, rounds + 1):
        turn = number % len(result.contenders)
        for setting in (*result.contenders[turn:], *result.contenders[:turn]):
            result.runs[setting].append(measure(setting, number))
            done += 1
            told(done, done + (rounds - number) * len(result.contenders))
        if number >= FEWEST_ROUNDS:
            result.drop()
            if result.loss <= ALLOWED_LOSS:
                break
    return result
