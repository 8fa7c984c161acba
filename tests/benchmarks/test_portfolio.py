"""``python -m benchmarks portfolio``: drafter auto against fixed choices."""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner, Result

from benchmarks.__main__ import application
from benchmarks.portfolio import cells
from benchmarks.portfolio.cells import AUTO, CELLS, CHOICES, PLAIN, chosen_cells
from benchmarks.portfolio.clock import _Slot, speed
from benchmarks.portfolio.figures import (
    against,
    against_best,
    best_fixed,
    geometric_mean,
    mixture,
)
from outrider import LLM, SamplingParams
from outrider.base.types import Event, Origin
from outrider.bench.intervals import student
from outrider.errors import ConfigError

TINY = ("--rounds", 1, "--tokens", 3, "--replay", "1m", "--drafter", "planted:0.7:1m")


def portfolio(*args: object) -> Result:
    return CliRunner().invoke(application("portfolio"), ["portfolio", *map(str, args)])


def test_the_command_measures_a_cell_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells, "ALONE", 1)
    out = tmp_path / "p.json"
    done = portfolio("--cells", "prose/1/1", *TINY, "--out", out)
    assert done.exit_code == 0, done.output
    assert "| prose/1/1 | " in done.stdout
    assert "geometric mean, auto/best: " in done.stdout
    assert "mixture: " in done.stdout
    report = json.loads(out.read_text())
    speeds = report["cells"]["prose/1/1"]
    assert list(speeds) == list(CHOICES)
    assert all(len(values) == 1 and values[0] > 0 for values in speeds.values())
    assert report["differing"] == {"prose/1/1": 0}
    # There is nothing left to do: the same file and the same table.
    again = portfolio("--cells", "prose/1/1", *TINY, "--out", out)
    assert again.stdout == done.stdout
    assert json.loads(out.read_text()) == report
    other = portfolio("--cells", "prose/1/1", *TINY, "--tokens", 4, "--out", out)
    assert other.exit_code == 2
    assert "was measured with other settings" in " ".join(other.stderr.split())


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--cells", "poems/1/0"), "names no cell"),
        (("--replay", "2t"), "replay size '2t' is not known"),
        (("--drafter", "planted:0.7"), "which costs nothing"),
        (("--drafter", "ngram"), "is not one of a replay target"),
        (("--rounds", "0"), "'--rounds'"),
        (("--out", "/no/such/folder/p.json"), "whose folder is not there"),
    ],
)
def test_wrong_requests_are_a_sentence(args: tuple[str, ...], said: str, tmp_path: Path) -> None:
    done = portfolio("--out", tmp_path / "p.json", *args)
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())


def test_cells_go_by_patterns() -> None:
    assert chosen_cells("*") == CELLS
    assert len(CELLS) == 24
    assert [cell.name for cell in chosen_cells("edit/*/0, code/8/1")] == [
        "code/8/1", "edit/1/0", "edit/8/0", "edit/32/0",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="names no cell"):
        chosen_cells("edit/1/0,edit/2/0")


def made_up(factors: dict[str, float], rounds: int, seed: int) -> dict[str, list[float]]:
    """Speeds of all choices, 100 where no factor stands, each with noise of 1 %."""
    noise = Random(seed)
    return {
        name: [100 * factors.get(name, 1) * math.exp(noise.gauss(0, 0.01)) for _ in range(rounds)]
        for name in CHOICES
    }


def test_figures_find_what_was_put_in() -> None:
    speeds = made_up({AUTO: 1.8, "suffix K=8": 2}, 12, 0)
    assert best_fixed(speeds, range(12)) == "suffix K=8"
    for found, ratio in ((against_best(speeds), 0.9), (against(speeds, PLAIN), 1.8)):
        assert abs(found.log - math.log(ratio)) < found.half_width < 0.03
    # Where all are the same, the best one is no luckier on the rounds it is compared on.
    logs = [against_best(made_up({}, 8, seed)).log for seed in range(200)]
    assert sum(logs) / 200 == pytest.approx(0, abs=4 * 0.01 * math.sqrt(2 / 8 / 200))
    other = made_up({AUTO: 1.8, "suffix K=8": 0.5}, 12, 1)
    mean = geometric_mean([against_best(speeds), against_best(other)])
    assert mean.log == pytest.approx(math.log(0.9 * 1.8) / 2, abs=0.02)
    # Per token auto takes 1/1.8 in both cells, the other one 1/2 and 1/0.5.
    both = mixture([speeds, other], "suffix K=8")
    assert both.log == pytest.approx(math.log(2.5 / (2 / 1.8)), abs=0.02)
    assert 0 < both.half_width < 0.03
    assert str(against(made_up({}, 3, 0), PLAIN)).count("[") == 0


@pytest.mark.parametrize(("freedom", "value"), [(3, 3.182), (5, 2.571), (11, 2.201), (60, 2.000)])
def test_students_quantiles_are_those_of_the_tables(freedom: int, value: float) -> None:
    assert student(freedom) == pytest.approx(value, rel=0.01)


def test_a_clock_ends_within_a_step_that_emits_several_tokens() -> None:
    events = [Event("r", 0, token, "", Origin.ACCEPTED) for token in range(4)]
    slot = _Slot(([1], None))  # type: ignore[arg-type]
    slot.take(events[:1], 5, 0.0, 0.0)
    slot.first = 1
    slot.take(events, 5, 0.0, 2.0)
    assert slot.took is None
    slot.take(events, 5, 2.0, 4.0)
    assert (slot.counted, slot.took) == (5, 2.5)
    slot.take(events, 5, 4.0, 6.0)
    assert (slot.counted, slot.took, len(slot.tokens)) == (5, 2.5, 13)


def test_the_clock_counts_drafts_and_what_is_accepted() -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    asked = [([5 + i, 9, 30], params) for i in range(2)]
    done = {
        drafter: speed(LLM(drafter=drafter, num_speculative_tokens=3, max_num_seqs=2), asked, 2, 12)
        for drafter in ("none", "model")
    }
    assert (done["none"].drafts, done["none"].accepted) == (0, 0)
    assert 0 < done["model"].accepted <= 3 * done["model"].drafts
    for mine, plain in zip(done["model"].outputs, done["none"].outputs, strict=True):
        assert len(plain) == 13
        assert all(a == b for a, b in zip(mine, plain, strict=False))
