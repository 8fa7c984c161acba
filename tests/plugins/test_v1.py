"""The rule in V1's runner, on tensors: a runner that calls the functions as vLLM's does."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.plugins.vllm import hooks, v1
from outrider.sampling.noise import gumbel

VOCABULARY = 23


def arguments(count: int, rng: random.Random) -> list[dict[str, Any]]:
    """A few requests, each with options, and a text that it has come to."""
    return [
        {
            "seed": rng.choice([0, 5, 2**40, -3]),
            "temperature": rng.choice([0.0, 0.5, 1.0, 1.3]),
            "top_k": rng.choice([VOCABULARY, 4]),
            "top_p": rng.choice([1.0, 0.6]),
            "computed": rng.randrange(90),
            "drafts": [rng.choice([0, 0, 1]) for _ in range(rng.randrange(4))],
        }
        for _ in range(count)
    ]


class Final:
    """vLLM's last step of a sampler: it must not be reached within a step."""

    logprobs_mode = "processed_logits"

    def forward(self, logits: Any, generators: Any, k: Any, p: Any) -> Any:
        raise AssertionError("vLLM's own draw")


class Runner:
    """What ``GPUModelRunner._sample`` uses, and its calls in vLLM's order."""

    def __init__(self, requests: list[dict[str, Any]]) -> None:
        names = [f"r{i}" for i in range(len(requests))]
        self.requests = {
            name: SimpleNamespace(sampling_params=SimpleNamespace(seed=one["seed"]))
            for name, one in zip(names, requests, strict=True)
        }
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(seed=0))
        self.sampler = SimpleNamespace(topk_topp_sampler=Final())
        widths = [1 + len(one["drafts"]) for one in requests]
        positions = [
            one["computed"] + i
            for one, width in zip(requests, widths, strict=True)
            for i in range(width)
        ]
        self.positions = torch.tensor(positions)
        starts = [0, *torch.tensor(widths).cumsum(0).tolist()]
        self.query_start_loc = SimpleNamespace(gpu=torch.tensor(starts, dtype=torch.int32))
        temperature = torch.tensor([one["temperature"] for one in requests])
        self.input_batch = SimpleNamespace(
            req_ids=names,
            generators={0: torch.Generator()},
            sampling_metadata=SimpleNamespace(
                all_greedy=bool((temperature == 0).all()),
                all_random=bool((temperature > 0).all()),
                temperature=temperature,
                top_k=torch.tensor([one["top_k"] for one in requests], dtype=torch.int32),
                top_p=torch.tensor([one["top_p"] for one in requests]),
            ),
        )

    def metadata(self, requests: list[dict[str, Any]]) -> Any:
        counts = [len(one["drafts"]) for one in requests]
        ends = self.query_start_loc.gpu[1:].to(torch.int64) - 1
        every = torch.arange(len(self.positions))
        return SimpleNamespace(
            num_draft_tokens=counts,
            max_spec_len=max(counts),
            draft_token_ids=torch.tensor(
                [token for one in requests for token in one["drafts"]], dtype=torch.int32
            ),
            logits_indices=every,
            bonus_logits_indices=ends,
            target_logits_indices=every[~torch.isin(every, ends)],
            cu_num_draft_tokens=torch.tensor(counts).cumsum(0).to(torch.int32),
        )

    def plain(self, logits: torch.Tensor) -> torch.Tensor:
        """vLLM's ``Sampler.sample``."""
        metadata = self.input_batch.sampling_metadata
        greedy = logits.argmax(-1)
        if metadata.all_greedy:
            return greedy
        hot = torch.where(metadata.temperature == 0, 1.0, metadata.temperature)
        logits = logits / hot[:, None]
        final = self.sampler.topk_topp_sampler
        drawn, shown = final.forward(logits, {}, metadata.top_k, metadata.top_p)
        assert shown.shape == logits.shape
        return torch.where(metadata.temperature == 0, greedy, drawn)


def not_ours(*args: Any, **named: Any) -> Any:
    raise AssertionError("vLLM's own function")


def original(self: Runner, logits: torch.Tensor, spec: Any) -> torch.Tensor:
    """vLLM's ``_sample``, and ``RejectionSampler.forward`` in it."""
    if spec is None:
        return self.plain(logits)[:, None]
    metadata = self.input_batch.sampling_metadata
    bonus = self.plain(logits[spec.bonus_logits_indices]).to(torch.int32)[:, None]
    rows = v1.apply_sampling_constraints(not_ours)(
        logits[spec.target_logits_indices].clone(), spec.cu_num_draft_tokens, metadata
    )
    return v1.rejection_sample(not_ours)(
        spec.draft_token_ids,
        spec.num_draft_tokens,
        spec.max_spec_len,
        spec.cu_num_draft_tokens,
        None,
        rows,
        bonus,
        metadata,
        synthetic_mode=False,
    )


def expected(one: dict[str, Any], logits: torch.Tensor) -> list[int]:
    """A request's tokens by the rule, row by row, with nothing of the plugin."""
    from outrider.params import SamplingParams
    from outrider.sampling.pipeline import truncate

    tokens: list[int] = []
    for i, row in enumerate(logits):
        z = row[None].clone()
        if one["temperature"]:
            z /= one["temperature"]
            params = SamplingParams(top_k=one["top_k"], top_p=one["top_p"])
            z = torch.from_numpy(truncate(z.numpy().copy(), params))
            position = one["computed"] + i + 1
            z = z + torch.from_numpy(gumbel([one["seed"] % 2**64], [0], [position], VOCABULARY))
        tokens.append(int(z.argmax()))
        if i < len(one["drafts"]) and one["drafts"][i] != tokens[-1]:
            break
    return tokens


def accepted_in(number: int) -> int:
    """How many drafted tokens stand in a made-up step whose tokens are those of the rule."""
    rng = random.Random(number)
    requests = arguments(7, rng)
    for one in requests:
        if number % 3 == 0:
            one["drafts"] = []
        if number == 5:
            one["temperature"] = 0.0
        if number == 7:
            one["temperature"] = 0.9
    runner = Runner(requests)
    generator = torch.Generator().manual_seed(number)
    logits = torch.randn(len(runner.positions), VOCABULARY, generator=generator) * 2
    logits[::2, 0] += 9  # most drafted tokens are this one, and many stand
    spec = None if number % 3 == 0 else runner.metadata(requests)
    output = v1.sample(original)(runner, logits.clone(), spec)
    starts = runner.query_start_loc.gpu.tolist()
    accepted = 0
    for one, got, begin, end in zip(requests, output.tolist(), starts, starts[1:], strict=False):
        tokens = expected(one, logits[begin:end])
        assert got == tokens + [-1] * (len(got) - len(tokens))
        accepted += len(tokens) - 1
    return accepted


def test_steps_with_and_without_drafts_draw_the_rule_s_tokens() -> None:
    accepted = [accepted_in(number) for number in range(24)]
    assert sum(map(bool, accepted)) > 8


class Proposer:
    """What a drafter's ``_sample_draft_tokens`` uses: its hidden states are logits here."""

    model = SimpleNamespace(compute_logits=lambda hidden: hidden)


@pytest.mark.parametrize("speculative", [True, False])
def test_drafts_are_drawn_with_the_noise_of_the_tokens_they_guess(speculative: bool) -> None:
    requests = arguments(9, random.Random(4))
    for one in requests if not speculative else ():
        one["drafts"] = []
    runner = Runner(requests)
    logits = torch.randn(len(runner.positions), VOCABULARY)
    logits[::2, 0] += 9
    spec = runner.metadata(requests) if speculative else None
    v1.sample(original)(runner, logits.clone(), spec)
    starts = runner.query_start_loc.gpu.tolist()
    drawn = [
        len(expected(one, logits[begin:end]))
        for one, begin, end in zip(requests, starts, starts[1:], strict=False)
    ]
    assert (max(drawn) > 1) == speculative
    own = v1.sample_draft_tokens(lambda *args: args)
    metadata = runner.input_batch.sampling_metadata
    for number in range(3):
        hidden = torch.randn(len(requests), VOCABULARY)
        tokens, shares = own(Proposer(), hidden, metadata)
        assert shares is None
        for one, row, count, token in zip(requests, hidden, drawn, tokens.tolist(), strict=True):
            behind = {**one, "computed": one["computed"] + count + number, "drafts": []}
            assert [token] == expected(behind, row[None])
    # What our noise does not fit stays vLLM's own.
    metadata.all_greedy = True
    assert own(Proposer, hidden, metadata) == (Proposer, hidden, metadata)
    metadata.all_greedy = False
    for other in v1.OTHER_DRAFTS:
        proposer = type("Other", (Proposer,), {other: True})()
        assert own(proposer, hidden, metadata)[0] is proposer
    assert own(Proposer, hidden[1:], metadata)[0] is Proposer


def test_zero_drafts_in_a_speculative_step() -> None:
    requests = [one | {"drafts": []} for one in arguments(3, random.Random(3))]
    runner = Runner(requests)
    logits = torch.randn(3, VOCABULARY)
    drafted = v1.sample(original)(runner, logits.clone(), runner.metadata(requests))
    assert drafted.tolist() == v1.sample(original)(runner, logits.clone(), None).tolist()


def test_a_step_that_draws_elsewhere_ends_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    requests = arguments(3, random.Random(1))
    runner = Runner(requests)
    with pytest.raises(SystemExit) as ended:
        v1.sample(lambda self, logits, spec: None)(runner, torch.randn(3, VOCABULARY), None)
    assert ended.value.code == 1
    assert "without Outrider's rule" in capsys.readouterr().err


def test_outside_of_a_step_vllm_s_own_functions_run() -> None:
    own = v1.rejection_sample(lambda *args, **named: (args, named))
    assert own(*range(9), synthetic_mode=True) == (tuple(range(9)), {"synthetic_mode": True})
    assert v1.apply_sampling_constraints(lambda *args: args)(1, 2, 3) == (1, 2, 3)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"rejection_sample_method": "fly"}, "'fly'"),
        ({"rejection_sample_method": "block"}, "'block'"),
        ({"rejection_sample_method": "synthetic"}, "'synthetic'"),
        ({"watermark": 1}, "watermark"),
    ],
)
def test_other_rules_end_the_process(
    config: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    speculative = SimpleNamespace(rejection_sample_method="standard")
    hooks.check_config(SimpleNamespace(speculative_config=None))
    hooks.check_config(SimpleNamespace(speculative_config=speculative, watermark_config=None))
    speculative.rejection_sample_method = config.get("rejection_sample_method", "standard")
    watermark = config.get("watermark")
    with pytest.raises(SystemExit):
        hooks.check_config(
            SimpleNamespace(speculative_config=speculative, watermark_config=watermark)
        )
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_a_runner_of_another_class_ends_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    class GPUModelRunner:
        def _sample(self) -> None: ...

    ours = SimpleNamespace(GPUModelRunner=GPUModelRunner)
    hooks.PATCHES["vllm.v1.worker.gpu_model_runner"](ours)  # type: ignore[arg-type]

    class Inherits(GPUModelRunner):
        pass

    class Overrides(GPUModelRunner):
        def _sample(self) -> None: ...

    hooks.check_runner(SimpleNamespace(model_runner=Inherits()))
    with pytest.raises(SystemExit):
        hooks.check_runner(SimpleNamespace(model_runner=Overrides()))
    assert "Overrides draws tokens itself" in capsys.readouterr().err
