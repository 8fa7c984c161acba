"""The rule in SGLang: its own functions, as its wheels have them, on tensors with trees."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.params import SamplingParams
from outrider.plugins.sglang import hooks, requests, sampling
from outrider.sampling.noise import gumbel
from outrider.sampling.pipeline import truncate
from tests.support.record_wheels import load

VOCABULARY, TOP_K_ALL = 29, 1 << 30
NODES, DEPTH = 6, 4
VERSIONS = ("0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23")
OPTIONS: list[dict[str, Any]] = [
    {"seed": 3},
    {"seed": 2**63 - 1, "temperature": 0.7, "top_k": 5},
    {"seed": 7, "temperature": 0.0},
    {"seed": -2, "temperature": 1.3, "top_p": 0.7, "top_k": 9},
    {"seed": 11, "min_p": 0.2},
]


@cache
def logits_behind(text: tuple[int, ...]) -> torch.Tensor:
    """A model: its logits behind a text."""
    generator = torch.Generator().manual_seed(hash(text) % 2**31)
    return torch.randn(VOCABULARY, generator=generator) * 2


def expected(text: tuple[int, ...], one: dict[str, Any]) -> int:
    """The rule: the token behind a text."""
    z = logits_behind(text)[None]
    temperature = one.get("temperature", 1.0)
    if not temperature:
        return int(z.argmax())
    z = z / temperature
    params = SamplingParams(top_k=one.get("top_k", 0), top_p=one.get("top_p", 1.0))
    z = torch.from_numpy(truncate(z.numpy().copy(), params))
    if "min_p" in one:
        z = z.masked_fill(z < z.max() + torch.tensor(one["min_p"]).log(), -torch.inf)
    g = torch.from_numpy(gumbel([one["seed"] % 2**64], [0], [len(text)], VOCABULARY))
    return int((z + g).argmax())


def info_of(batch: list[dict[str, Any]]) -> Any:
    """SGLang's ``SamplingBatchInfo``, with a temperature of 0 as it writes that."""
    greedy = [one.get("temperature") == 0.0 for one in batch]
    top_k = [1 if cold else one.get("top_k", TOP_K_ALL) for cold, one in zip(greedy, batch)]  # noqa: B905
    heat = [one.get("temperature", 1.0) or 1.0 for one in batch]
    return SimpleNamespace(
        temperatures=torch.tensor(heat)[:, None],
        top_ks=torch.tensor(top_k, dtype=torch.int32),
        top_ps=torch.tensor([one.get("top_p", 1.0) for one in batch]),
        min_ps=torch.tensor([one.get("min_p", 0.0) for one in batch]),
        need_top_k_sampling=any(k != TOP_K_ALL for k in top_k),
        need_top_p_sampling=any("top_p" in one for one in batch),
        need_min_p_sampling=any("min_p" in one for one in batch),
        sampling_seed=torch.tensor([one["seed"] for one in batch], dtype=torch.int64),
        is_all_greedy=all(greedy),
        has_custom_logit_processor=False,
        has_watermark_candidates=False,
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
        logit_bias=None,
        grammars=None,
        return_sampling_masks=None,
        sampling_mask_batch_indices=None,
        sampling_support_logprobs_capture_indices=None,
    )


class Stub(ModuleType):
    """A module of SGLang in which every function does nothing."""

    SIMULATE_ACC_LEN = -1

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **named: None


def walk(**tensors: Any) -> tuple[torch.Tensor, ...]:
    """SGLang's greedy walk, which it has in CUDA and Triton."""
    predicts, index, number = (
        tensors[name] for name in ("predicts", "accept_index", "accept_token_num")
    )
    candidates, places = tensors["candidates"], tensors["retrieve_index"]
    target = tensors["target_predict"].flatten()
    for row in range(len(candidates)):
        last = index[row, 0] = places[row, 0]
        node, accepted = 0, 0
        for _ in range(1, index.shape[1]):
            node = int(tensors["retrieve_next_token"][row, node])
            while node != -1 and candidates[row, node] != target[last]:
                node = int(tensors["retrieve_next_sibling"][row, node])
            if node == -1:
                break
            predicts[last] = target[last]
            accepted += 1
            last = index[row, accepted] = places[row, node]
        number[row] = accepted
        predicts[last] = target[last]
    return predicts, index, number


def compiled(version: str, file: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run a version's recorded functions of a file as a module with these names in it."""
    functions = load("sglang")[version][file]
    scope = dict(names)
    for source in functions.values():
        exec("from __future__ import annotations\n" + source, scope)
    return scope


@pytest.fixture(params=VERSIONS)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The sampler and ``eagle_sample`` of a version, hooked."""
    version = request.param
    for name in (
        "sglang", "sglang.srt", "sglang.srt.distributed", "sglang.srt.layers",
        "sglang.srt.layers.dp_attention", "sglang.srt.runtime_context", "sglang.srt.sampling",
        "sglang.srt.sampling.penaltylib", "sglang.srt.sampling.penaltylib.repetition_penalty",
        "sglang.srt.speculative", "sglang.srt.speculative.spec_utils", "sglang.srt.utils",
        "sglang.srt.utils.async_probe",
    ):  # fmt: skip
        monkeypatch.setitem(sys.modules, name, Stub(name))
    nothing: Callable[..., None] = lambda *args, **named: None  # noqa: E731
    flags = dict.fromkeys(("_is_cpu", "_is_cuda", "_is_hip", "_is_npu", "_is_xpu", "_use_aiter"))
    common = flags | {"torch": torch, "maybe_detect_nan": nothing, "sanitize_nan_logits": nothing}
    rejects = SimpleNamespace(speculative_use_rejection_sampling=False)
    verification = SimpleNamespace(
        **compiled(
            version, "srt/speculative/eagle_utils.py", common | {"get_spec": lambda: rejects}
        )
    )
    # The functions look names up in their own globals, as a module's do.
    scope = verification.eagle_sample.__globals__
    scope["verify_tree_greedy_func"] = sampling.verify_tree_greedy(walk)
    eagle_sample = sampling.eagle_sample(verification.eagle_sample)
    module = compiled(
        version,
        "srt/layers/sampler.py",
        common
        | {
            "_trace_e2e_sampler": nothing,
            "SGLANG_RETURN_ORIGINAL_LOGPROB": False,
            "sampler_softmax": lambda logits: torch.softmax(logits, -1),
            "_SamplingMaskCapture": SimpleNamespace if version != "0.5.19" else None,
        },
    )
    capture = module["_SamplingMaskCapture"]
    sampler = type(
        "Sampler",
        (),
        {
            "forward": sampling.forward(module["forward"]),
            "_preprocess_logits": sampling.preprocess_logits(module["_preprocess_logits"]),
            "_sample_from_probs": sampling.sample_from_probs(capture)(module["_sample_from_probs"]),
            "_sync_token_ids_across_tp": nothing,
            "rl_on_policy_target": None,
            "use_ascend_backend": False,
            "use_log_softmax_logprob": False,
            "enable_deterministic": False,
        },
    )()
    return SimpleNamespace(sampler=sampler, eagle_sample=eagle_sample)


def plain_step(engine: Any, texts: list[tuple[int, ...]], batch: list[dict[str, Any]]) -> list[int]:
    output = SimpleNamespace(next_token_logits=torch.stack([logits_behind(t) for t in texts]))
    positions = torch.tensor([len(text) - 1 for text in texts])
    tokens = engine.sampler.forward(output, info_of(batch), False, [], [], positions)
    return list(tokens.tolist())


def tree_step(
    engine: Any, texts: list[tuple[int, ...]], batch: list[dict[str, Any]], rng: random.Random
) -> list[list[int]]:
    """The tokens of a step that verifies random trees, many of whose nodes are right."""
    rows, shape = len(texts), (len(texts), NODES)
    candidates, links = torch.zeros(shape, dtype=torch.int64), torch.full((2, *shape), -1)
    logits, positions = [], []
    for row, text in enumerate(texts):
        nodes = [text]  # the root is the text's last token
        candidates[row, 0] = text[-1]
        for node in range(1, NODES):
            open_ = [i for i, each in enumerate(nodes) if len(each) < len(text) + DEPTH - 1]
            parent = rng.choice(open_)
            right = expected(nodes[parent], batch[row])
            taken = {each[-1] for each in nodes if each[:-1] == nodes[parent]}
            token = right if right not in taken and rng.random() < 0.7 else node
            nodes.append((*nodes[parent], token))
            candidates[row, node] = token
            links[1, row, node], links[0, row, parent] = links[0, row, parent].clone(), node
        logits += [logits_behind(each) for each in nodes]
        positions += [len(each) - 1 for each in nodes]
    tree = SimpleNamespace(
        draft_token=candidates.flatten(),
        draft_token_num=NODES,
        max_tree_depth=DEPTH,
        tree_topk=-1,
        positions=torch.tensor(positions),
        retrieve_index=torch.arange(rows * NODES).view(shape),
        retrieve_next_token=links[0],
        retrieve_next_sibling=links[1],
    )
    step = SimpleNamespace(
        device="cpu",
        forward_mode=SimpleNamespace(is_idle=lambda: False),
        seq_lens=[len(text) - 1 for text in texts],
        sampling_info=info_of(batch),
    )
    was = step.sampling_info.is_all_greedy
    output = SimpleNamespace(next_token_logits=torch.stack(logits))
    predict, lengths, index = engine.eagle_sample(tree, step, output)
    assert step.sampling_info.is_all_greedy == was
    return [
        [int(predict[place]) for place in index[row, : int(lengths[row])]] for row in range(rows)
    ]


def test_trees_bring_the_tokens_of_plain_decoding(engine: Any) -> None:
    starts = [(1, 2, 3 + i) for i in range(len(OPTIONS))]
    plain = list(starts)
    for _ in range(12):
        tokens = plain_step(engine, plain, OPTIONS)
        assert tokens == [expected(*each) for each in zip(plain, OPTIONS, strict=True)]
        plain = [(*text, token) for text, token in zip(plain, tokens, strict=True)]
    rng = random.Random(0)
    for _ in range(3):
        texts, steps = list(starts), 0
        while min(map(len, texts)) < len(plain[0]):
            steps += 1
            for row, tokens in enumerate(tree_step(engine, texts, OPTIONS, rng)):
                texts[row] += tuple(tokens)
        assert [text[: len(plain[0])] for text in texts] == plain
        assert steps < 12  # drafts stood


def test_a_greedy_batch_and_an_idle_one(engine: Any) -> None:
    batch = [{"seed": 1, "temperature": 0.0}, {"seed": 2, "temperature": 0.0}]
    texts: list[tuple[int, ...]] = [(4, 5), (6, 7, 8)]
    want = [expected(text, one) for text, one in zip(texts, batch, strict=True)]
    assert plain_step(engine, texts, batch) == want
    firsts = [tokens[0] for tokens in tree_step(engine, texts, batch, random.Random(1))]
    assert firsts == want
    idle = SimpleNamespace(device="cpu", forward_mode=SimpleNamespace(is_idle=lambda: True))
    assert [len(each) for each in engine.eagle_sample(None, idle, None)] == [0, 0, 0]


def test_a_step_that_draws_elsewhere_ends_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    output = SimpleNamespace(next_token_logits=torch.zeros(1, VOCABULARY))
    info = info_of([{"seed": 1}])
    with pytest.raises(SystemExit):
        sampling.forward(lambda *args, **named: None)(None, output, info)
    step = SimpleNamespace(forward_mode=SimpleNamespace(is_idle=lambda: False), sampling_info=info)
    with pytest.raises(SystemExit):
        sampling.eagle_sample(lambda *args, **named: None)(None, step, output)
    info.sampling_seed = None
    with pytest.raises(SystemExit):
        sampling.tokens_of(output.next_token_logits, info, torch.zeros(1), 1)
    said = capsys.readouterr().err
    assert said.count("without Outrider's rule") == said.count("\n") == 3


def test_every_request_gets_a_seed() -> None:
    made = SimpleNamespace(sampling_seed=None)
    hooked = requests.from_schedule_batch(lambda cls, batch, size: made)
    batch = SimpleNamespace(
        device="cpu",
        reqs=[
            SimpleNamespace(rid=rid, sampling_params=SimpleNamespace(sampling_seed=seed))
            for rid, seed in (("a", 5), ("a", None), ("b", None), ("a", -1))
        ],
    )
    first = hooked(None, batch, 10).sampling_seed.tolist()
    assert first[0] == 5
    assert first[3] == -1
    assert len(set(first)) == 4
    assert hooked(None, batch, 10).sampling_seed.tolist() == first  # on every rank


def test_requests_that_would_lose_the_rule_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    verify = requests.verify(lambda self, size: None)

    def ask(**options: Any) -> None:
        neutral = {"sampling_seed": None, "n": 1, **requests.NEUTRAL}
        verify(SimpleNamespace(**neutral | options), 10)

    ask(frequency_penalty=0.5)  # plain decoding counts every token
    with pytest.raises(ValueError, match="seed 4 with n=2"):
        ask(sampling_seed=4, n=2)
    monkeypatch.setattr(requests, "speculates", True)
    ask(sampling_seed=4)
    for name, value in {"frequency_penalty": 0.5, "presence_penalty": -1.0,
                        "repetition_penalty": 1.1, "min_new_tokens": 3}.items():  # fmt: skip
        with pytest.raises(ValueError, match=f"{name}={value} depends on the drafts"):
            ask(**{name: value})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"speculative_algorithm": "DFLASH"}, "--speculative-algorithm DFLASH verifies"),
        ({"speculative_use_rejection_sampling": True}, "--speculative-use-rejection-sampling True"),
        ({"speculative_accept_threshold_acc": 0.5}, "--speculative-accept-threshold-acc 0.5"),
        ({"enable_watermark": True}, "--enable-watermark True"),
        ({"rl_on_policy_target": "fsdp"}, "--rl-on-policy-target fsdp"),
    ],
)
def test_servers_with_another_rule_do_not_start(
    arguments: dict[str, Any],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(requests, "speculates", False)
    hooks.check_arguments(SimpleNamespace(speculative_algorithm=None))
    assert not requests.speculates
    hooks.check_arguments(SimpleNamespace(speculative_algorithm="eagle3", enable_watermark=False))
    assert requests.speculates
    with pytest.raises(SystemExit):
        hooks.check_arguments(SimpleNamespace(**arguments))
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_modules_are_changed_where_sglang_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "speculates", False)
    started = []

    class Served:
        def __init__(self, server_args: Any, port_args: Any, *, gpu_id: int = 0) -> None:
            started.append((port_args, gpu_id))

    class Info:
        @classmethod
        def from_schedule_batch(cls, batch: Any, vocab_size: int) -> Any:
            return cls()

    class Params:
        sampling_seed, n = 3, 2

        def verify(self, vocab_size: int) -> None: ...

    for patch, name in (
        (hooks.PATCHES["sglang.srt.managers.scheduler"], "Scheduler"),
        (hooks.PATCHES["sglang.srt.managers.tokenizer_manager"], "TokenizerManager"),
    ):
        own = type(name, (Served,), {"__init__": Served.__init__})
        patch(SimpleNamespace(**{name: own}))  # type: ignore[arg-type]
        own(SimpleNamespace(speculative_algorithm="NGRAM"), "port", gpu_id=1)
        with pytest.raises(SystemExit):
            own(server_args=SimpleNamespace(speculative_algorithm="UNO"), port_args="port")
    assert started == [("port", 1)] * 2
    hooks._batch_info(SimpleNamespace(SamplingBatchInfo=Info))  # type: ignore[arg-type]
    one = SimpleNamespace(rid="a", sampling_params=SimpleNamespace(sampling_seed=4))
    made: Any = Info.from_schedule_batch(SimpleNamespace(reqs=[one], device="cpu"), 9)
    assert made.sampling_seed.tolist() == [4]
    assert isinstance(made, Info)
    patched: Any = SimpleNamespace(SamplingParams=Params)
    hooks.PATCHES["sglang.srt.sampling.sampling_params"](patched)
    with pytest.raises(ValueError, match="seed 3 with n=2"):
        Params().verify(9)
    module: Any = SimpleNamespace(eagle_sample=None, verify_tree_greedy_func=None)
    hooks.PATCHES["sglang.srt.speculative.eagle_utils"](module)
    assert module.eagle_sample.__name__ == "eagle_sample"
    assert module.verify_tree_greedy_func.__name__ == "verify_tree_greedy_func"


def test_made_up_acceptance_does_not_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "3.5")
    with pytest.raises(SystemExit):
        hooks.check_arguments(SimpleNamespace(speculative_algorithm="NGRAM"))
    assert "SGLANG_SIMULATE_ACC_LEN" in capsys.readouterr().err


def test_a_sampler_of_somebody_else_s_does_not_start(capsys: pytest.CaptureFixture[str]) -> None:
    class Sampler:
        def forward(self) -> None: ...
        def _preprocess_logits(self) -> None: ...
        def _sample_from_probs(self) -> None: ...

    class Own(Sampler):
        def forward(self) -> None: ...

    for made, ends in ((Sampler, False), (Own, True)):
        module: Any = SimpleNamespace(Sampler=Sampler, create_sampler=made)
        hooks._sampler(module)
        if ends:
            with pytest.raises(SystemExit):
                module.create_sampler()
        else:
            assert isinstance(module.create_sampler(), Sampler)
    assert "Own draws tokens itself" in capsys.readouterr().err
