"""Replay targets: their distributions, their drafters, and that speculation leaves them alone."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner, Result

from outrider import SamplingParams, pocket
from outrider.bench.distributions import (
    AGREEMENT_STREAM,
    CERTAIN_PEAK,
    LAW_STREAM,
    OPEN_PEAKS,
    OPEN_SHARE,
    OTHER_TOKENS,
    SPREAD_SHARE,
    planted_track,
    target_track,
)
from outrider.bench.offline import BenchOptions, drafter_names, recorded_answers
from outrider.bench.replay import (
    SIZES,
    Replay,
    ReplayModel,
    ReplaySize,
    parse_planted,
    parts_of,
    write_random,
)
from outrider.bench.workload import BUNDLED, load_workload
from outrider.checkpoints.architecture import Mixture
from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.checkpoints.tokenizers import read_codec
from outrider.cli import app
from outrider.errors import ConfigError
from outrider.models.native import is_native
from outrider.models.python_step import PythonStep
from outrider.models.rows import Track
from outrider.params import StructuredOutputsParams
from outrider.sampling.noise import words

VOCABULARY = 4096
PROMPT = [5, 6, 7, 8]


def tokens(count: int, seed: int = 0) -> list[int]:
    """Any ids but EOS."""
    return np.random.default_rng(seed).integers(2, VOCABULARY, count).tolist()


def test_sizes_are_what_their_names_say() -> None:
    for name, size in SIZES.items():
        whole, _, active = name.partition("-a")
        parameters = size.parameters(VOCABULARY)
        assert parameters == pytest.approx(float(whole[:-1]) * 1e6, rel=0.2)
        idle = size.layers * (size.experts - size.top) * 3 * size.inner * size.width
        assert not active or parameters - idle == pytest.approx(float(active[:-1]) * 1e6, rel=0.2)


def test_a_mixture_is_a_model(tmp_path: Path) -> None:
    size = ReplaySize(2, 64, 32, 2, 1, experts=4, top=2)
    write_random(size, tmp_path, VOCABULARY, 64, [0], 0)
    checkpoint = open_checkpoint(tmp_path)
    assert is_native(checkpoint)
    assert checkpoint.architecture is not None
    assert checkpoint.architecture.mixture == Mixture(4, 2, 32, renormalised=True)
    assert checkpoint.tensors.shapes() == size.tensors(VOCABULARY)


def test_a_law_is_what_its_specification_says() -> None:
    answer, seed = tokens(4000), 3
    track = target_track(answer, VOCABULARY, seed)
    p = np.exp(track.z.astype(np.float64))
    rest = np.exp(track.rest.astype(np.float64)) * (VOCABULARY - 1 - OTHER_TOKENS)
    assert np.allclose(p.sum(1) + rest, 1, atol=1e-6)
    assert track.ids[:, 0].tolist() == answer
    assert all(len(set(row)) == 1 + OTHER_TOKENS for row in track.ids.tolist())
    peak = p[:, 0]
    certain = np.abs(peak - CERTAIN_PEAK) < 1e-6
    assert ((peak > OPEN_PEAKS[0]) & (peak < OPEN_PEAKS[1]) | certain).all()
    # Four standard deviations of a share and of a mean of 1,200 uniform numbers.
    assert 1 - certain.mean() == pytest.approx(OPEN_SHARE, abs=4 * math.sqrt(0.21 / 4000))
    assert peak[~certain].mean() == pytest.approx(sum(OPEN_PEAKS) / 2, abs=0.02)
    assert np.allclose(rest, (1 - peak) * SPREAD_SHARE, rtol=1e-4)
    assert np.allclose(p[:, 2:], p[:, 1:-1] / 2, rtol=1e-5)
    # The recorded token is the most likely one everywhere, and one row by hand.
    assert bool((p[:, 0] > p[:, 1]).all())
    index = int(np.flatnonzero(~certain)[0])
    u = (words([seed], [answer[index]], [index], 2, LAW_STREAM)[0] + 0.5) / 2**32
    low, high = OPEN_PEAKS
    assert u[0] < OPEN_SHARE
    assert peak[index] == pytest.approx(low + (high - low) * u[1], rel=1e-6)


def test_a_law_depends_on_seed_index_and_token_alone() -> None:
    answer = tokens(50)
    track = target_track(answer, VOCABULARY, 0)
    changed = [*answer[:20], answer[20] ^ 1, *answer[21:30]]
    other = target_track(changed, VOCABULARY, 0)
    same = [i for i in range(30) if np.array_equal(track.ids[i], other.ids[i])]
    assert same == [i for i in range(30) if i != 20]
    assert np.array_equal(track.z[same], other.z[same])
    assert not np.array_equal(track.ids, target_track(answer, VOCABULARY, 1).ids)


def dense(track: Track, count: int) -> NDArray[np.float32]:
    """The first log probabilities of a track, fp32 [count, vocabulary]."""
    rows = track.rest[:count, None].repeat(VOCABULARY, 1)
    np.put_along_axis(rows, track.ids[:count], track.z[:count], 1)
    return rows


@cache
def replay(count: int = 1500) -> tuple[Replay, list[int]]:
    """The smallest replay target, with one prompt of that long an answer."""
    answer = tokens(count)
    return Replay("1m", pocket.PATH, [PROMPT], [answer]), answer


def run(drafter: str, params: SamplingParams, k: int = 4, **options: Any) -> Any:
    llm = replay()[0].open(drafter, num_speculative_tokens=k, max_num_seqs=1, **options)
    return llm.generate(PROMPT, params)[0]


@pytest.mark.parametrize("agreement", [0.0, 0.3, 0.8, 1.0])
def test_a_planted_drafter_agrees_as_often_as_chosen(agreement: float) -> None:
    count = 1200
    params = SamplingParams(temperature=0, max_tokens=count)
    found = run(f"planted:{agreement}", params)
    assert found.outputs[0].token_ids == replay()[1][:count]
    metrics = found.metrics
    alike = metrics.acceptance_by_position
    drafts = metrics.drafted / 4
    for position, share in enumerate(alike, 1):
        chosen = agreement**position
        deviation = math.sqrt(max(chosen * (1 - chosen), 1e-9) / drafts)
        assert share == pytest.approx(chosen, abs=4 * deviation + 0.01)
    # Draft by draft, it is the noise that says where.
    answer = replay()[1]
    track = planted_track(target_track(answer, VOCABULARY, 0), VOCABULARY, 0, agreement)
    u = (words([0] * 1500, answer, range(1500), 1, AGREEMENT_STREAM)[:, 0] + 0.5) / 2**32
    assert ((track.ids[:, 0] == answer) == (u < agreement)).all()


def test_the_engine_samples_from_the_law() -> None:
    answer = replay()[1]
    params = SamplingParams(temperature=1, seed=4, max_tokens=300, logprobs=3)
    output = run("planted:0.7", params).outputs[0]
    track = target_track(answer, VOCABULARY, 0)
    for i, found in enumerate(output.logprobs):
        assert found[answer[i]].logprob == pytest.approx(float(track.z[i, 0]), abs=1e-4)
    kept = sum(a == b for a, b in zip(output.token_ids, answer, strict=False))
    expected = np.exp(track.z[:300, 0])
    deviation = float((expected * (1 - expected)).sum() ** 0.5)
    assert kept == pytest.approx(float(expected.sum()), abs=4 * deviation)
    assert kept < 300


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("drafter", ["planted:0.8", "planted:0.8:1m"])
def test_the_ratio_rules_replay_as_well(rule: str, drafter: str) -> None:
    for temperature, k in ((0, 4), (1, 1)):
        params = SamplingParams(temperature=temperature, seed=2, max_tokens=400)
        found = run(drafter, params, k, acceptance_rule=rule)
        answer = replay()[1][:400]
        assert (found.outputs[0].token_ids == answer) == (temperature == 0)
        # At K = 1 a draft that is certain stands with the distribution's probability of its token,
        # and any other with 1 - TV on average.
        track = target_track(replay()[1], VOCABULARY, 0)
        if k == 1:
            planted = planted_track(track, VOCABULARY, 0, 0.8)
            p, q = (np.exp(dense(each, 400)) for each in (track, planted))
            if drafter.endswith("m"):
                expected = float(np.minimum(p, q).sum(1).mean())
            else:
                expected = float(np.take_along_axis(p, planted.ids[:400, :1], 1).mean())
            assert found.metrics.acceptance_rate == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize("agreement", [0.3, 0.7, 0.9, 1.0])
def test_a_planted_drafter_is_accepted_as_often_as_it_agrees(agreement: float) -> None:
    count = 2000
    target = target_track(tokens(count), VOCABULARY, 0)
    planted = planted_track(target, VOCABULARY, 0, agreement)
    p, q = dense(target, count), dense(planted, count)
    assert np.allclose(np.exp(q).sum(1), 1, atol=1e-4)
    assert (planted.z[:, :-1] >= planted.z[:, 1:]).all()
    noise = np.random.default_rng(1).gumbel(size=p.shape)
    same = ((p + noise).argmax(1) == (q + noise).argmax(1)).mean()
    # Four standard deviations of a share.
    assert float(same) == pytest.approx(agreement, abs=4 * math.sqrt(0.25 / count))
    agrees = planted.ids[:, 0] == target.ids[:, 0]
    assert float(agrees.mean()) == pytest.approx(agreement, abs=4 * math.sqrt(0.25 / count))
    if agreement == 0.7:  # margins tell: a wide one is right far more often than a narrow one
        margin = planted.z[:, 0] - planted.z[:, 1]
        narrow, wide = agrees[margin < 1].mean(), agrees[margin > 2].mean()
        assert narrow < 0.6 < 0.8 < wide < 1


def test_in_the_engine_a_planted_model_is_accepted_as_often_too() -> None:
    for temperature in (0, 1):
        params = SamplingParams(temperature=temperature, seed=5, max_tokens=1000)
        found = run("planted:0.7:1m", params, 1)
        assert found.metrics.acceptance_rate == pytest.approx(0.7, abs=4 * math.sqrt(0.21 / 550))


PROMPTS = [[5, 6, 7, 8 + i] for i in range(4)]


@cache
def batch_of_four() -> Replay:
    return Replay("1m", pocket.PATH, PROMPTS, [tokens(60, i) for i in range(4)])


@pytest.mark.parametrize("drafter", ["none", "planted:0.6:1m", "planted:0.6:1m+suffix"])
@pytest.mark.parametrize("nodes", [None, 12])
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_the_native_step_replays_as_python_does(
    drafter: str, nodes: int | None, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    more: list[dict[str, Any]] = [
        {}, {"logprobs": 2, "prompt_logprobs": 1}, {"frequency_penalty": 0.3, "top_k": 20},
        {"logits_processors": [lambda ids, logits: logits]},
    ]  # fmt: skip
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=50, **each)
        for i, each in enumerate(more)
    ]

    def found() -> list[Any]:
        llm = batch_of_four().open(
            drafter, num_speculative_tokens=4, max_num_seqs=4, max_draft_nodes=nodes
        )
        return [
            (o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs, o.metrics.drafted,
             o.metrics.accepted)
            for o in llm.generate(PROMPTS, params)
        ]  # fmt: skip

    native = found()
    if drafter != "none":
        assert all(drafted > accepted > 0 for *_, drafted, accepted in native)
    if temperature == 0:
        assert native[0][0] == tokens(60, 0)[:50]
    monkeypatch.setattr(ReplayModel, "decide", PythonStep.decide)
    monkeypatch.setattr(ReplayModel, "draft", PythonStep.draft)
    assert native == found()


def test_a_prefix_cache_changes_nothing() -> None:
    prompt = tokens(40, 1)
    target = Replay("1m", pocket.PATH, [prompt], [tokens(30)])
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=20) for i in range(2)]
    found = []
    for caches in (False, True):
        llm = target.open("planted:0.6:1m", max_num_seqs=2, enable_prefix_caching=caches)
        found += [llm.generate([prompt] * 2, params) for _ in range(2)]
    outputs = [[o.outputs[0].token_ids for o in each] for each in found]
    assert all(each == outputs[0] for each in outputs)
    assert [each[0].num_cached_tokens > 0 for each in found] == [False, False, False, True]


def test_auto_chooses_among_what_is_planted_and_lookups() -> None:
    params = SamplingParams(temperature=0, max_tokens=60)
    llm = batch_of_four().open("auto+planted:0.9:1m", max_num_seqs=4)
    assert set(llm.engine.menu.portfolio) == {"model", "suffix", "prediction"}
    assert "model+suffix" in llm.engine.menu.names
    outputs = llm.generate(PROMPTS, params)
    assert [o.outputs[0].token_ids for o in outputs] == [tokens(60, i) for i in range(4)]
    batch_of_four().open("none", max_num_seqs=4)
    assert len(batch_of_four()._models) == 1  # weights that are there once


def test_past_the_recorded_answer_comes_the_end() -> None:
    made = Replay("1m", pocket.PATH, [PROMPT], [tokens(6)]).open("none")
    output = made.generate(PROMPT, SamplingParams(temperature=0, max_tokens=50))[0].outputs[0]
    assert output.token_ids == [*tokens(6), 0]
    assert output.finish_reason == "stop"


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("workload", BUNDLED)
def test_speculation_does_not_change_what_is_replayed(workload: str, temperature: float) -> None:
    codec = read_codec(pocket.PATH)
    chosen = load_workload(workload).first(2)
    prompts = [item.encode(codec) for item in chosen.items]
    answers = recorded_answers(chosen, codec)
    target = Replay("1m", pocket.PATH, prompts, answers)
    params = [
        SamplingParams(
            temperature=temperature, seed=i, max_tokens=40,
            structured_outputs=item.schema and StructuredOutputsParams(json=item.schema),
        )
        for i, item in enumerate(chosen.items)
    ]  # fmt: skip
    plain, *others = (
        [o.outputs[0].token_ids for o in target.open(d, max_num_seqs=2).generate(prompts, params)]
        for d in ("none", "ngram", "suffix", "planted:0.8", "planted:0.6:1m")
    )
    assert all(other == plain for other in others)
    assert (plain == [a[:40] for a in answers]) == (temperature == 0)


def test_prompts_that_were_not_recorded_get_the_models_own_words() -> None:
    llm = replay()[0].open("planted:0.9")
    params = SamplingParams(temperature=0, max_tokens=5)
    found = llm.generate([[9, 9, 9], PROMPT], params)
    assert found[1].outputs[0].token_ids == replay()[1][:5]
    assert found[0].outputs[0].token_ids != replay()[1][:5]


def test_what_cannot_be_replayed_is_refused() -> None:
    with pytest.raises(ConfigError, match="replay size '7b' is not known; give one of 1m, 3m"):
        Replay("7b", pocket.PATH, [PROMPT], [tokens(5)])
    with pytest.raises(ConfigError, match="shorter than 2 tokens"):
        Replay("1m", pocket.PATH, [PROMPT], [[3]])
    with pytest.raises(ConfigError, match="prompt 2 came before with another answer"):
        Replay("1m", pocket.PATH, [PROMPT] * 2, [tokens(5), tokens(6)])
    assert parse_planted("planted:.5:3m") == (0.5, "3m")
    for wrong in ("planted", "planted:1.1", "planted:-1", "auto", "planted:0.5:"):
        with pytest.raises(ConfigError, match="is not one of a replay target"):
            parse_planted(wrong)
    with pytest.raises(ConfigError, match="size '9x'"):
        parse_planted("planted:0.5:9x")
    assert parts_of("auto+planted:0.7:3m") == (["planted:0.7:3m"], True)
    with pytest.raises(ConfigError, match="joins two of a kind"):
        parts_of("planted:0.5:3m+planted:0.6")
    with pytest.raises(ConfigError, match="give --replay as well"):
        drafter_names(BenchOptions(model=pocket.PATH, target="t", drafters=("planted:0.5",)))


def bench(*args: object) -> Result:
    return CliRunner().invoke(app, ["bench", *(str(a) for a in args)])


def test_the_command_measures_lists_and_draws_them(tmp_path: Path) -> None:
    file, picture = tmp_path / "b.json", tmp_path / "b.png"
    done = bench(
        "--replay", "1m", "--drafter", "planted:0.5,ngram", "--num-speculative-tokens", "1,3",
        "--temperature", "0,1", "--batch-size", "1,2", "--prompts", "json", "--num-prompts", 2,
        "--max-tokens", 10, "--out", file, "--plot", picture,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "replay-1m · workload json" in done.stdout
    assert "replay: random weights" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    runs = json.loads(file.read_text())["runs"]
    keys = ("temperature", "batch_size", "drafter", "num_speculative_tokens")
    drafters = [("none", 0), *((d, k) for d in ("planted:0.5", "ngram") for k in (1, 3))]
    order = [(t, b, *d) for t in (0, 1) for b in (1, 2) for d in drafters]
    assert [tuple(run[key] for key in keys) for run in runs] == order
    for run in runs:
        assert run["outputs_identical"]
        assert (run["target"], run["workload"]) == ("replay-1m", "json")
        assert run["structured_outputs"]
        assert (run["replay"]["size"], run["replay"]["seed"]) == ("1m", 0)
        assert run["replay"]["parameters"] == SIZES["1m"].parameters(VOCABULARY)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--replay", "2t"), "replay size '2t' is not known"),
        (("--replay", "1m", "--prompts", "code"), "prompt 1 of workload 'code' has no recorded"),
        (("--replay", "1m", "--drafter", "auto"), "drafter 'auto' is not one of a replay target"),
        (("--drafter", "planted:0.5"), "give --replay as well"),
        (("--batch-size", "3"), "batch_size 3 does not divide the 8 prompts"),
        (("--batch-size", "0"), "batch_size is 0"),
        (("--batch-size", "1,x"), "'1,x'"),
        (("--prompts", "poems"), "workload 'poems' is not known"),
        (("--plot", "b.pdf"), "ends in .png"),
        (("--plot", "/no/such/folder/b.png"), "/no/such/folder"),
        (("--plot", "b.png", "--drafter", "none"), "nothing to show without a drafter"),
    ],
)
def test_wrong_requests_are_a_sentence(args: tuple[str, ...], said: str) -> None:
    done = bench(*args)
    assert done.exit_code == 2
    shown = " ".join(done.stderr.replace("│", " ").split())
    assert said in shown
