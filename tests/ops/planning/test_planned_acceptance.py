"""What planning knows of acceptance: rates, survival, counts, priors, files."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.base.types import Counts
from outrider.errors import ConfigError
from outrider.ops.planning import of_counts, of_positions, of_rate, read_acceptance
from outrider.ops.planning.acceptance import parse_acceptance, per_token, prior, rate_at
from outrider.ops.planning.catalogue import data


@pytest.mark.parametrize("k", [1, 2, 5, 16])
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.45, 0.73, 0.99, 1.0])
def test_the_chance_per_token_gives_the_published_rate(rate: float, k: int) -> None:
    chance = per_token(rate, k)
    assert rate_at(chance, k) == pytest.approx(rate, abs=1e-9)
    assert of_rate(rate, k).rate(k) == pytest.approx(rate, abs=1e-9)
    if k > 1 and 0 < rate < 1:
        assert chance > rate + 0.001  # which a rate read as a chance per token would miss


def test_survival_by_position_is_kept_and_goes_on_as_it_ended() -> None:
    shares = [0.92, 0.81, 0.71, 0.62, 0.51]
    known = of_positions(shares)
    assert known.survival(5) == pytest.approx(shares)
    assert known.rate(5) == pytest.approx(fmean(shares)) == pytest.approx(0.714)
    assert known.survival(7)[5:] == pytest.approx([0.51 * (0.51 / 0.62), 0.51 * (0.51 / 0.62) ** 2])
    assert of_positions([0.5, 0.0]).survival(4) == [0.5, 0, 0, 0]


def test_a_constant_chance_gives_the_closed_form_of_tokens() -> None:
    known = of_rate(0.5, 1).with_chances(lambda _: 0.8)
    assert known.tokens(5) == pytest.approx((1 - 0.8**6) / (1 - 0.8))
    low, high = known.tokens(5, -1.0), known.tokens(5, 1.0)
    assert low < known.tokens(5) < high < 6


def decoded(text: str, k: int) -> Counts:
    """Return the counts of decoding tokens that a drafter has right (1), wrong (0), or not (-)."""
    counts, at = Counts(), 0
    while at < len(text):
        draft = text[at : at + k][: len(text) - at - 1].partition("-")[0]
        accepted = (draft + "0").index("0")
        counts.record(len(draft), len(draft), accepted, accepted + 1)
        at += accepted + 1
    return counts


@given(st.text("01-", max_size=40), st.integers(1, 6))
def test_counts_of_long_drafts_tell_what_short_ones_bring(text: str, k: int) -> None:
    """Exactly so where no draft is cut off, so that nobody knows what would have followed."""
    text, longest = "10-" + text, 44
    known, short = of_counts(decoded(text, longest), longest), decoded(text, k)
    assert known.tokens(k) == pytest.approx(short.emitted / short.steps)
    assert known.drafted(k) == pytest.approx(short.drafted / short.steps)
    assert known.rate(k) == pytest.approx(short.acceptance_rate)


def test_runs_are_taken_in_more_steps_by_shorter_drafts() -> None:
    # 20 tokens without a draft, and runs of 45 that are right: five steps of nine tokens each.
    counts = Counts()
    for _ in range(20):
        counts.record(0, 0, 0, 1)
    for _ in range(5):
        counts.record(8, 8, 8, 9)
    known = of_counts(counts, 8)
    assert known.tokens(8) == pytest.approx(65 / 25)
    assert known.tokens(1) == pytest.approx(65 / (20 + 45 / 2))
    assert known.drafted(1) == pytest.approx(22.5 / 42.5)
    assert known.rate(1) == known.rate(8) == 1
    assert known.survival(10)[8:] == pytest.approx([known.survival(8)[-1]] * 2)
    assert known.tokens(8, -2.0) < known.tokens(8)
    none = Counts()
    none.record(0, 0, 0, 1)
    with pytest.raises(ConfigError, match="nothing was drafted"):
        of_counts(none, 8)


def test_priors_are_the_published_ranges_at_p10_and_p90() -> None:
    known = prior("model", {"conversation": 1.0})
    assert known.rate(5, -1.2816) == pytest.approx(0.65, abs=0.002)
    assert known.rate(5, 1.2816) == pytest.approx(0.75, abs=0.002)
    assert known.evidence == "assumed"
    mixed = prior("model", {"conversation": 3.0, "creative": 1.0})
    assert prior("model", {"creative": 1.0}).rate(5) < mixed.rate(5) < known.rate(5)
    assert prior("model", {"conversation": 1.0}, 1.0).rate(5) < known.rate(5)
    table = data("acceptance")["method"]["model"]
    assert [table[task] for task in ("conversation", "code", "qa", "creative")] == [
        [0.65, 0.75], [0.55, 0.70], [0.50, 0.65], [0.45, 0.60],
    ]  # fmt: skip


def test_files_of_outrider_vllm_and_plain_ones_are_read(tmp_path: Path) -> None:
    def written(content: object) -> Path:
        file = tmp_path / "measured.json"
        file.write_text(json.dumps(content), encoding="utf-8")
        return file

    runs = [
        {"drafter": "none", "acceptance_by_position": None},
        {"drafter": "model", "acceptance_by_position": [0.8]},
        {"drafter": "model", "acceptance_by_position": [0.8, 0.6]},
        {"drafter": "ngram", "acceptance_by_position": [0.3]},
    ]
    known = read_acceptance(written({"runs": runs[:3]}))
    assert known.survival(2) == pytest.approx([0.8, 0.6])
    assert known.evidence == "measured"
    assert read_acceptance(written({"runs": runs}), "ngram").survival(1) == [0.3]
    with pytest.raises(ConfigError, match="acceptance of model, ngram; name one"):
        read_acceptance(written({"runs": runs}))
    vllm = {
        "spec_decode_per_position_acceptance_rates": [0.7, 0.5], "spec_decode_num_drafts": 10_000
    }  # fmt: skip
    many = read_acceptance(written(vllm))
    assert many.survival(2) == pytest.approx([0.7, 0.5])
    few = read_acceptance(written({**vllm, "spec_decode_num_drafts": 10}))
    assert many.spread < few.spread  # the more was counted, the surer it is
    plain = {"acceptance_rate": 0.73, "num_speculative_tokens": 5}
    assert read_acceptance(written(plain)).rate(5) == pytest.approx(0.73)
    for content in ({}, [], 3, {"runs": 3}, {"runs": [{}]}, {"acceptance_by_position": []}):
        with pytest.raises(ConfigError, match="has no acceptance"):
            read_acceptance(written(content))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0.7", "has no K"), ("1.5", "from 0 to 1"), ("1.5@5", "from 0 to 1"),
        ("-0.1@5", "from 0 to 1"), ("nan@5", "from 0 to 1"), ("0.7@0", "draft length from 1"),
        ("0.7@5000", "draft length from 1"), ("0.7@x", "give a file"), ("missing.json", "give a"),
        ("0.5,0.6", "rises"), ("0.9,1.2", "from 0 to 1"), ("0.9,", "give a file"),
    ],
)  # fmt: skip
def test_acceptance_that_makes_no_sense_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_acceptance(text)
    assert parse_acceptance("0.73@5").rate(5) == pytest.approx(0.73)
