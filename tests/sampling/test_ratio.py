"""The ratio rules: their output distributions by enumeration, their noise, the engine."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from outrider.audit import oracle
from outrider.audit.adversary import AdversarySpec
from outrider.base.config import ACCEPTANCE_RULES
from outrider.base.types import Draft, Request, Row, SamplingParams
from outrider.engine.engine import Engine
from outrider.errors import ConfigError
from outrider.models.base import Model as Target
from outrider.models.rows import Segment
from outrider.sampling import ratio_noise
from outrider.sampling.acceptance import NOT_FINITE
from outrider.sampling.noise import SHARED_STREAM
from outrider.sampling.pipeline import Logits, RequestPipeline, SequencePipeline, StepLogits
from outrider.sampling.ratio import (
    RULES,
    Block,
    Chains,
    Ratio,
    Rejection,
    _chains,
    of_drafted,
)
from outrider.sampling.seeds import SEED_STREAM
from outrider.sampling.shared_noise import SharedNoise
from tests.support import enumeration
from tests.support.enumeration import Emissions, Model
from tests.support.exactness import make_engine, planted_pair, requests, run

PROMPT = (0, 2)
PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.4},
    {"temperature": 0.9, "top_k": 2},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 1.2, "min_p": 0.3},
    {"temperature": 0.8, "top_k": 3, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 0.0},
    # These change along a draft, with what was drafted before.
    {"temperature": 1.0, "repetition_penalty": 1.5, "frequency_penalty": 0.6},
    {"temperature": 0.9, "presence_penalty": -1.5, "min_tokens": 2, "top_p": 0.95},
    {"temperature": 1.1, "logit_bias": {1: 1.5, 3: -2.0}, "allowed_token_ids": [0, 1, 3]},
    {"temperature": 0.0, "frequency_penalty": 1.0},
]
REFERENCES = {
    "rejection": enumeration.token_rule_output_law,
    "block": enumeration.block_rule_output_law,
}
Raw = Callable[[tuple[int, ...]], Logits]


def raw_logits(seed: int, vocabulary: int) -> Raw:
    """Logits that depend on the path: fp32 [vocabulary]."""
    rng = np.random.default_rng(seed)

    @cache
    def raw(_: tuple[int, ...]) -> Logits:
        return rng.standard_normal(vocabulary, np.float32) * 1.5

    return raw


def oracle_model(raw: Raw, options: dict[str, Any]) -> Model:
    """The distribution after each path in float64; token 1 ends an output."""
    given = dict(options)
    before = {name: given.pop(name) for name in PENALTIES if name in given}
    before["allowed"] = given.pop("allowed_token_ids", ())
    before |= {n: given.pop(n) for n in ("logit_bias", "min_tokens") if n in given}

    @cache
    def distribution(path: tuple[int, ...]) -> oracle.Distribution:
        z = oracle.processed(raw(path), PROMPT, path, ends=[1], **before)
        return oracle.distribution(z, **given)

    return distribution


def processed(raw: Raw, options: dict[str, Any], paths: list[tuple[int, ...]]) -> Logits:
    """Processed logits after ``paths``, one-hot where greedy: fp32 [paths, vocabulary]."""
    params = SamplingParams(**options)  # type: ignore[arg-type]
    z = np.stack([raw(path) for path in paths])
    request = Request("r", PROMPT, params, 0, frozenset([1]))
    distribution = SequencePipeline(RequestPipeline(request, z.shape[1]))
    z = distribution.apply(z, list(PROMPT), [list(path) for path in paths])
    if params.greedy:
        z = np.where(z == z.max(-1, keepdims=True), 0.0, -math.inf).astype(np.float32)
    return z


def emissions(rule: Ratio, target: Raw, drafter: Raw, options: dict[str, Any], length: int,
              certain: bool) -> Emissions:  # fmt: skip
    """What ``rule`` emits, exactly: every draft, every outcome of its uniforms."""
    vocabulary = len(target(()))
    drafts = list(itertools.product(range(vocabulary), repeat=length))
    if certain:
        drafts = drafts[len(drafts) // 2 :][:1]
    x = np.array(drafts, np.int64).reshape(len(drafts), length)
    stacked = [processed(target, options, [d[:i] for i in range(length + 1)]) for d in drafts]
    q_rows = [processed(drafter, options, [d[:i] for i in range(length)]) for d in drafts if length]
    z_q = None if certain or not length else np.stack(q_rows)
    chains = _chains(np.stack(stacked), z_q, x)
    drawn = of_drafted(chains.q, x).prod(-1)
    chains = Chains(chains.p[drawn > 0], chains.q[drawn > 0], chains.x[drawn > 0])
    with np.errstate(invalid="ignore", divide="ignore"):
        w, h = rule.odds(chains)
    found: Emissions = {}
    for passed in itertools.product((False, True), repeat=length):
        mask = np.broadcast_to(np.array(passed, bool), (len(w), length))
        chance = drawn[drawn > 0] * np.where(mask, h, 1 - h).prod(-1)
        accepted = rule.count(mask)
        weights = rule.after(chains, w, accepted)
        distribution = chance[:, None] * weights / weights.sum(-1, keepdims=True)
        for draft, count, row in zip(
            chains.x.tolist(), accepted.tolist(), distribution, strict=True
        ):
            for token in np.flatnonzero(row).tolist():
                key = (*draft[:count], token)
                found[key] = found.get(key, 0.0) + float(row[token])
    return found


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("rule", [Rejection(), Block()])
def test_the_output_law_is_the_oracles_and_the_targets(
    rule: Ratio, options: dict[str, Any], certain: bool
) -> None:
    """By enumeration, so there is no false alarm; 1e-6 is what fp32 logits may be off."""
    for length, seed in itertools.product((0, 1, 2, 3), range(2)):
        target, drafter = raw_logits(seed, 4), raw_logits(100 + seed, 4)
        found = emissions(rule, target, drafter, options, length, certain)
        p, q = oracle_model(target, options), oracle_model(drafter, options)
        if not certain:
            expected = REFERENCES[rule.name](p, q, length)
            keys = found.keys() | expected.keys()
            assert all(abs(found.get(k, 0) - expected.get(k, 0)) < 1e-6 for k in keys)
        joint = enumeration.continued(found, p, length + 1)
        exact = enumeration.continued({(): 1.0}, p, length + 1)
        np.testing.assert_allclose(joint, exact, atol=1e-6)


def test_block_accepts_at_least_as_much_as_rejection() -> None:
    gains = []
    for seed in range(20):
        target, drafter = raw_logits(seed, 3), raw_logits(200 + seed, 3)
        block, token = (
            enumeration.accepted_per_draft(emissions(rule, target, drafter, OPTIONS[0], 3, False))
            for rule in (Block(), Rejection())
        )
        gains.append(block - token)
    assert min(gains) >= -1e-12
    assert max(gains) > 0.01


@pytest.mark.parametrize("rule", [Rejection(), Block()])
def test_a_perfect_drafter_is_always_accepted(rule: Ratio) -> None:
    rng = np.random.default_rng(0)
    z = rng.standard_normal((500, 4, 300), np.float32) * 3
    x = (z[:, :3] + rng.gumbel(size=(500, 3, 300))).argmax(-1)
    u = np.full((500, 3), 1 - 2.0**-33)
    accepted, _ = rule.decide(z, z[:, :3], x, u, np.zeros((500, 300), np.float32))
    assert accepted.tolist() == [3] * 500


def test_where_p_and_q_cannot_be_told_apart_the_target_draws() -> None:
    """The drafter's token has no mass in p, and what p has more of elsewhere is below rounding."""
    z_p = np.array([[[0.0, -math.inf], [0.0, -math.inf]]], np.float32)
    z_q = np.array([[[0.0, -50.0]]], np.float32)
    x, u = np.array([[1]]), np.array([[0.5]])
    for rule in (Rejection(), Block()):
        accepted, token = rule.decide(z_p, z_q, x, u, np.zeros((1, 2), np.float32))
        assert (accepted.item(), token.item()) == (0, 0)


def _row(name: str, position: int, base: int, greedy: bool = False, seed: int = 3) -> Row:
    return Row(name, seed, 0, position, greedy, base)


@pytest.mark.parametrize("rule", [Rejection(), Block()])
def test_a_step_decides_each_sequence_as_it_would_alone(rule: Ratio) -> None:
    """Greedy and sampled, certain and drawn drafts, several lengths, and one that draws nothing."""
    rng = np.random.default_rng(5)
    lengths, certain, greedy = [2, 0, 2, 3, 2, 0], [0, 1, 1, 0, 0, 1], [0, 0, 0, 0, 1, 1]
    tokens = [rng.integers(0, 20, n).tolist() for n in lengths]
    drafter = [None if c else rng.standard_normal((n, 20), np.float32)
               for n, c in zip(lengths, certain, strict=True)]  # fmt: skip
    z = [rng.standard_normal((n + 1, 30), np.float32) for n in lengths]
    rows = [[_row(f"s{s}", 50 + s + i, 50 + s, bool(greedy[s])) for i in range(n + 1)]
            for s, n in enumerate(lengths)]  # fmt: skip
    noise = SharedNoise(40)
    starts = np.cumsum([0, *(n + 1 for n in lengths)]).tolist()
    draft = Draft.chains([*tokens, []])
    logits = [*drafter, None]
    draft = Draft(each._replace(logits=z) for each, z in zip(draft, logits, strict=True))
    distributions = StepLogits(
        np.concatenate(z), [row for part in rows for row in part], [*starts[:-1], None]
    )
    together = rule(distributions, draft, noise)
    assert together.tokens[-1] == []
    assert together.errors == [None] * 7
    for s in range(6):
        one = Draft([draft[s]])
        alone = rule(StepLogits(z[s].copy(), rows[s], [0]), one, noise)
        assert alone.tokens[0] == together.tokens[s]
        assert together.path[s] == list(range(len(together.tokens[s]) - 1))
        assert together.tokens[s][:-1] == tokens[s][: len(together.path[s])]
        if greedy[s]:
            best = z[s].argmax(-1).tolist()
            agreed = [a == b for a, b in zip(tokens[s], best, strict=False)]
            count = agreed.index(False) if False in agreed else len(agreed)
            assert together.tokens[s] == [*tokens[s][:count], best[count]]


def test_laws_that_are_not_numbers_are_reported_where_they_can_be_reached() -> None:
    z = np.zeros((3, 8), np.float32)
    z[2] = math.nan
    rows = [_row("s", 10 + i, 10) for i in range(3)]
    for rule in (Rejection(), Block()):
        verdict = rule(StepLogits(z.copy(), rows, [0]), Draft.chains([[1, 2]]), SharedNoise(8))
        assert verdict.errors == [NOT_FINITE]
        masked = z.copy()
        masked[1, 2] = -math.inf
        verdict = rule(StepLogits(masked, rows, [0]), Draft.chains([[1, 2]]), SharedNoise(8))
        assert verdict.errors == [None]


def test_no_draw_is_used_twice() -> None:
    """Streams of kinds and bases are apart from each other, from the shared one and the seeds'."""
    bases = [0, 1, 2, 1000, ratio_noise.LARGEST_BASE]
    rows = [_row("s", 5, base) for base in bases]
    kinds = (ratio_noise.DRAFTING, ratio_noise.ACCEPTING, ratio_noise.ENDING)
    streams = [s for kind in kinds for s in ratio_noise.streams(kind, rows)]
    assert len(set(streams)) == len(streams)
    assert min(streams) > SHARED_STREAM
    assert max(streams) < SEED_STREAM
    for base in (-1, ratio_noise.LARGEST_BASE + 1):
        with pytest.raises(ValueError, match="base"):
            ratio_noise.streams(0, [_row("s", 5, base)])
    noise = [ratio_noise.FreshNoise(16, kind).of(rows) for kind in kinds]
    assert len(np.unique(np.concatenate(noise), axis=0)) == 15
    again = ratio_noise.FreshNoise(16, 0).of(rows[2:3])
    assert np.array_equal(again, noise[0][2:3])
    u = ratio_noise.uniforms([_row("s", i, 0) for i in range(4000)])
    assert 0 < u.min() < u.max() < 1
    # 5 standard deviations: a false alarm once in 1.7 million seeds, and the seed is fixed.
    assert abs(u.mean() - 0.5) < 5 * math.sqrt(1 / 12 / 4000)


# The engine over them.


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted_pair(tmp_path_factory.mktemp("ratio"))


def logits_after(model: Target, tokens: list[int]) -> Logits:
    pages = list(range(1, len(tokens) // 4 + 2))
    store = model.new_store(len(pages) + 1, 4)
    found = model.run([Segment(tokens, 0, pages, 1, 1, key="it")], store).logits
    assert found is not None
    return found[0]


def p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    """Pearson's chi-square, cells that expect fewer than 8 taken as one."""
    large = expected >= 8
    seen, due = ([*a[large], a[~large].sum()] for a in (counts, expected))
    pairs = [(s, d) for s, d in zip(seen, due, strict=True) if d > 0]
    assert sum(seen) == sum(s for s, _ in pairs), "a token came that the target never says"
    statistic = sum((s - d) ** 2 / d for s, d in pairs)
    half = torch.tensor([(len(pairs) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


class NoNoise(ratio_noise.FreshNoise):
    """Lets the drafter take its likeliest token."""

    def of(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        return np.zeros((len(rows), self.vocab_size), np.float32)


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_the_engine_emits_the_targets_law(
    pair: Path, rule: str, certain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The joint distribution of three tokens over 1,000 seeds; a false alarm: 1e-6 each."""
    engine = make_engine(pair, "model", acceptance_rule=rule, num_speculative_tokens=2)
    options = {"temperature": 1.3, "top_k": 3}
    prompt = [11]
    if certain:
        monkeypatch.setattr(engine.drafter, "_needs_logits", False)
        engine.drafting._noise = NoNoise(211, ratio_noise.DRAFTING)
    seen = np.zeros((211,) * 3)
    for start in range(0, 1000, 100):
        queued = [
            Request(f"r{seed}", tuple(prompt), SamplingParams(max_tokens=4, **options), seed)
            for seed in range(start, start + 100)
        ]
        found = run(engine, queued)
        for request in queued:
            seen[tuple(found[f"{request.id}/0"][:3])] += 1
    model = partial(logits_after, engine.model)
    target = oracle_model(lambda path: model([*prompt, *path]), options)
    expected = enumeration.continued({(): 1.0}, target, 3) * seen.sum()
    assert p_value(seen.ravel(), expected.ravel()) > 1e-6
    assert 0 < engine.counts.accepted < engine.counts.drafted


@pytest.mark.parametrize("drafter", ["model", "ngram", "suffix"])
@pytest.mark.parametrize("rule", ACCEPTANCE_RULES)
def test_greedy_is_plain_under_every_rule(pair: Path, rule: str, drafter: str) -> None:
    prompts = [[11, 12, 13, 14, 15] * 4, [7], [50, 60, 70]]
    params = SamplingParams(temperature=0, max_tokens=20)
    plain = run(make_engine(pair, "none"), requests(prompts, params))
    engine = make_engine(pair, drafter, acceptance_rule=rule)
    assert run(engine, requests(prompts, params)) == plain
    assert engine.counts.accepted > 0


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_the_end_cuts_inside_a_draft(pair: Path, rule: str) -> None:
    """The same seed and drafts repeat; a shorter limit or an EOS only cuts what was there."""
    prompts = [[11, 12, 13], [7], [50, 60, 70]]
    params = SamplingParams(temperature=0.5, max_tokens=40, ignore_eos=True)
    found = run(make_engine(pair, "model", acceptance_rule=rule), requests(prompts, params))
    again = run(make_engine(pair, "model", acceptance_rule=rule), requests(prompts, params))
    assert found == again
    for name in (f"r{i}/0" for i in range(len(prompts))):
        ids = found[name]
        end = ids[7]
        stopping = SamplingParams(temperature=0.5, max_tokens=40, ignore_eos=True,
                                  stop_token_ids=[end])  # fmt: skip
        engine = make_engine(pair, "model", acceptance_rule=rule)
        cut = run(engine, requests(prompts, stopping))[name]
        assert cut == ids[: ids.index(end) + 1]
        assert engine.counts.accepted <= engine.counts.emitted


def test_a_rule_is_chosen_by_name(pair: Path) -> None:
    assert tuple(RULES) == ACCEPTANCE_RULES
    assert [make().name for make in RULES.values()] == list(RULES)
    with pytest.raises(ConfigError, match="acceptance_rule is 'typical'; give one of coupled, "):
        make_engine(pair, "none", acceptance_rule="typical")


def test_trees_are_refused_at_construction(pair: Path) -> None:
    ragged = AdversarySpec("ragged")
    for rule in ("rejection", "block"):
        with pytest.raises(ConfigError, match="cannot verify the trees of drafter 'ragged'"):
            make_engine(pair, ragged, acceptance_rule=rule)
    assert isinstance(make_engine(pair, ragged), Engine)
