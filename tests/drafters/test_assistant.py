"""Gemma 4's assistant: transformers' own model on the same entries, and drafts change no token."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from outrider import LLM
from outrider.base.fields import read_object
from outrider.base.types import Request, SamplingParams
from outrider.checkpoints.assistant import pairs
from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.drafters.assistant import AssistantSpec
from outrider.drafters.check import check
from outrider.drafters.registry import find_drafter
from outrider.errors import OutriderError
from outrider.models.assistant import Assistant, Context
from outrider.models.fallback import Fallback, KeptSequence
from outrider.models.load import load_model
from outrider.models.rows import Segment
from tests.support.assistant import (
    FULL,
    SLIDING,
    TARGETS,
    WIDTH,
    make_assistant,
    make_gemma4,
    of_transformers,
)
from tests.support.exactness import alone, in_batches, make_engine, make_fickle, requests

LENGTH, DEPTH = 40, 4
"""Tokens before a draft, more than a window has, and tokens of the draft."""
IDS = [int(i) for i in np.random.default_rng(0).integers(5, 200, LENGTH)]
PROMPTS = [IDS[:19], [11, 12, 13, 14, 15] * 5, [40, 50]]
Mutant = Callable[[Assistant, Context, int], Any]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    return functools.cache(lambda *a: make_gemma4(tmp_path_factory.mktemp("gemma4"), *a))


@pytest.fixture(scope="module")
def assistant(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    return functools.cache(lambda *a: make_assistant(tmp_path_factory.mktemp("assistant"), *a))


class Drafted(NamedTuple):
    """Logits of the tokens of a draft, and the states that they leave."""

    logits: torch.Tensor
    states: torch.Tensor


def load(folder: Path) -> Fallback:
    model = load_model(open_checkpoint(folder), "float32", "cpu", 256)
    assert isinstance(model, Fallback)
    return model


class Target(NamedTuple):
    """What transformers' target says of all but the last of ``IDS``."""

    model: Any
    entries: dict[str, tuple[torch.Tensor, torch.Tensor]]
    state: torch.Tensor
    unnormed: torch.Tensor


@torch.inference_mode()
def read(model: Any) -> Target:
    unnormed: list[torch.Tensor] = []
    norm = model.get_decoder().norm
    hook = norm.register_forward_pre_hook(lambda module, args: unnormed.append(args[0]))
    ids = torch.tensor([IDS[:-1]])
    cache = DynamicCache()  # without windows: each layer keeps all
    out = model(ids, output_hidden_states=True, past_key_values=cache)
    hook.remove()
    last = 1 if model.config.get_text_config().num_kv_shared_layers else 3
    layers = {FULL: cache.layers[last], SLIDING: cache.layers[last - 1]}
    entries = {kind: (layer.keys, layer.values) for kind, layer in layers.items()}
    return Target(model, entries, out.hidden_states[-1][:, -1:], unnormed[0][0, -1:])


@torch.inference_mode()
def theirs(folder: Path, target: Target) -> tuple[Drafted, list[int]]:
    """What transformers' assistant says, and the tokens before each row.

    Its entries end with one of the last token, as in transformers, and the mask leaves that out.
    """
    model, state, token = of_transformers(folder), target.state, IDS[-1]
    shared = {
        kind: tuple(torch.cat((each, torch.full_like(each[:, :, :1], 7.0)), 2) for each in both)
        for kind, both in target.entries.items()
    }
    mask = torch.ones(1, LENGTH, dtype=torch.long)
    mask[0, -1] = 0
    tokens, logits, states = [], [], []
    for _ in range(DEPTH):
        tokens.append(token)
        embedding = target.model.get_input_embeddings()(torch.tensor([[token]]))
        out = model(
            inputs_embeds=torch.cat((embedding, state), -1), attention_mask=mask,
            position_ids=torch.tensor([[LENGTH - 1]]), shared_kv_states=shared,
        )  # fmt: skip
        state, token = out.last_hidden_state, int(out.logits[0, 0].argmax())
        logits.append(out.logits[0, 0])
        states.append(state[0, 0])
    return Drafted(torch.stack(logits), torch.stack(states)), tokens


def ours(
    folder: Path, model: Fallback, tokens: list[int], change: Mutant = lambda a, c, step: None
) -> Drafted:
    """What the assistant says after ``tokens``; ``change`` may change it before each row."""
    mine, store = Assistant(open_checkpoint(folder), model), model.new_store(8, 16)
    change(mine, Context(0, {}, torch.empty(0)), -1)
    for start, stop in ((0, 10), (10, LENGTH - 1)):  # a chunk that ends within a span
        model.run([Segment(IDS[start:stop], start, (), 1, LENGTH - 1, key="a")], store)
    assert mine.can_draft(store, "a", LENGTH)
    context = mine._context(store.kept["a"], LENGTH - 1)
    mine._contexts["a"] = context
    logits, states = [], []
    for step, token in enumerate(tokens):
        change(mine, context, step)
        found = mine.run([Segment([token], LENGTH - 1 + step, (), 1, LENGTH - 1, key="a")], store)
        assert found.logits is not None
        logits.append(torch.from_numpy(found.logits[0]))
        states.append(context.state[0])
    return Drafted(torch.stack(logits), torch.stack(states))


def far(one: Drafted, other: Drafted) -> float:
    """How far logits and states differ at most; ids that are not scored are transformers' least."""
    scored = one.logits.isfinite()
    least = other.logits.min(-1, keepdim=True).values.expand_as(other.logits)
    if not torch.equal(other.logits[~scored], least[~scored]):
        return float("inf")
    found = (one.logits - other.logits)[scored].abs().max()
    return float(max(found, (one.states - other.states).abs().max()))


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("wrapped", [False, True])
def test_it_is_transformers_model(
    kind: str, wrapped: bool, ordered: bool,
    target: Callable[..., Path], assistant: Callable[..., Path],
) -> None:  # fmt: skip
    model, folder = load(target(kind, wrapped)), assistant(kind, ordered)
    expected, tokens = theirs(folder, read(model._model))
    found = ours(folder, model, tokens)
    assert expected.logits.std() > 0.3
    distance = far(found, expected)
    assert distance < 1e-3
    assert ordered == bool(found.logits.isinf().any())


def swap(weights: dict[str, torch.Tensor]) -> None:
    name = "pre_projection.weight"
    weights[name] = weights[name].roll(WIDTH, 1)


def without(sliding: bool, rows: slice) -> Mutant:
    """The same with fewer entries of a kind of layer."""
    kind = SLIDING if sliding else FULL

    def change(mine: Assistant, context: Context, step: int) -> None:
        if step == 0:
            keys, values = context.entries[kind]
            context.entries[kind] = keys[:, :, rows], values[:, :, rows]

    return change


def at(first: int, change: Callable[[Assistant, Context], Any]) -> Mutant:
    """A change before the row ``first`` alone; -1 is before anything is read."""
    return lambda mine, context, step: change(mine, context) if step == first else None


def unscaled(mine: Assistant) -> None:
    decoder = mine._decoder
    mine._decoder = SimpleNamespace(
        embed_tokens=lambda ids: decoder.embed_tokens(ids) / WIDTH**0.5,
        rotary_emb=decoder.rotary_emb,
    )


def wider(mine: Assistant, rows: int) -> None:
    mine._text.sliding_window += rows


MUTANTS: dict[str, Mutant] = {
    "position of the last entry": at(0, lambda a, c: setattr(c, "position", c.position - 1)),
    "positions go on": lambda a, c, step: setattr(c, "position", c.position + (step > 0)),
    "a window of one row less": at(-1, lambda a, c: wider(a, -1)),
    "a window of one row more": at(-1, lambda a, c: wider(a, 1)),
    "no last entry where a window is": without(True, slice(-1)),
    "no last entry where none is": without(False, slice(-1)),
    "no first entry where no window is": without(False, slice(1, None)),
    "other layers": at(-1, lambda a, c: a._read.update({SLIDING: 0, FULL: 1})),
    "embeddings without their scale": at(-1, lambda a, c: unscaled(a)),
    "state before embedding": at(-1, lambda a, c: swap(a._weights)),
    "no scale of layers": at(
        -1, lambda a, c: [w.fill_(1) for n, w in a._weights.items() if "layer_scalar" in n]
    ),
    "no state of its own": lambda a, c, step: setattr(c, "state", c.state * (step == 0)),
    "all ids are scored": at(-1, lambda a, c: setattr(a, "_groups", None)),
    "one group less": at(-1, lambda a, c: setattr(a, "_top", a._top - 1)),
}
OF_GROUPS = ("all ids are scored", "one group less")
"""Mutants that only an output matrix with groups has."""


@pytest.mark.parametrize("name", MUTANTS)
def test_each_convention_counts(
    name: str, target: Callable[..., Path], assistant: Callable[..., Path]
) -> None:
    model, folder = load(target("alike")), assistant("alike", name in OF_GROUPS)
    expected, tokens = theirs(folder, read(model._model))
    distance = far(ours(folder, model, tokens, MUTANTS[name]), expected)
    assert distance > 1e-2


def test_the_state_is_normed(target: Callable[..., Path], assistant: Callable[..., Path]) -> None:
    model, folder = load(target("shared")), assistant("shared")
    said = read(model._model)
    expected, tokens = theirs(folder, said)
    other = at(0, lambda a, c: setattr(c, "state", said.unnormed))
    distance = far(ours(folder, model, tokens, other), expected)
    assert distance > 1e-2


def queue(temperature: float) -> list[Request]:
    """Requests of all prompts, and of the first one again."""
    params = SamplingParams(temperature=temperature, max_tokens=20, ignore_eos=True)
    return requests([*PROMPTS, PROMPTS[0]], params)


@pytest.fixture(scope="module")
def plain(target: Callable[..., Path]) -> Callable[[str, float], dict[str, list[Any]]]:
    return functools.cache(lambda kind, temperature: alone(target(kind), queue(temperature)))


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How far each draft's state and entries are from those of a target that reads all anew."""
    found: list[float] = []
    whole = Assistant._context

    def checked(self: Assistant, kept: KeptSequence, position: int) -> Context:
        context = whole(self, kept, position)
        again = self.target.new_store(1, 16)
        self.target.run([Segment(kept.tokens[:position], 0, (), 1, position)], again)
        expected = whole(self, again.kept[""], position)
        pairs = [(context.state, expected.state)]
        for kind, both in expected.entries.items():
            pairs += [*zip(context.entries[kind], both, strict=True)]
        found.append(max(float((a - b).abs().max()) for a, b in pairs))
        return context

    monkeypatch.setattr(Assistant, "_context", checked)
    return found


@pytest.mark.parametrize(
    ("kind", "ordered", "batch", "chunk"),
    [("shared", True, 1, 64), ("shared", False, 4, 7), ("alike", True, 4, 64)],
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_change_no_token(
    kind: str, ordered: bool, batch: int, chunk: int, temperature: float,
    target: Callable[..., Path], assistant: Callable[..., Path],
    plain: Callable[[str, float], dict[str, list[Any]]],
) -> None:  # fmt: skip
    """In batches, in chunks, and of a prompt that comes again."""
    engine = make_engine(target(kind), str(assistant(kind, ordered)), max_num_batched_tokens=chunk)
    assert in_batches(engine, queue(temperature), batch) == plain(kind, temperature)
    assert engine.counts.accepted < engine.counts.nodes
    assert engine.counts.accepted or not temperature


def test_drafts_read_what_is_committed(
    target: Callable[..., Path], assistant: Callable[..., Path], contexts: list[float],
    plain: Callable[[str, float], dict[str, list[Any]]],
) -> None:  # fmt: skip
    """Whatever was rejected before, and after preemptions."""
    engine = make_engine(target("shared"), str(assistant("shared")), 20)
    assert in_batches(engine, queue(0.8), 4) == plain("shared", 0.8)
    assert engine.scheduler.preemptions > 0
    assert 0 < engine.counts.accepted < engine.counts.nodes
    assert len(contexts) > 10
    assert max(contexts) == 0


def test_auto_takes_it_in_turns(
    target: Callable[..., Path], assistant: Callable[..., Path],
    plain: Callable[[str, float], dict[str, list[Any]]],
) -> None:  # fmt: skip
    drafter = f"auto+{assistant('alike')}"
    engine = make_engine(target("alike"), drafter, num_speculative_tokens=None)
    make_fickle(engine, random.Random(1))
    assert in_batches(engine, queue(0.8), 4) == plain("alike", 0.8)
    assert "assistant" in engine.drafting.drafters
    assert engine.counts.accepted > 0


def test_a_ratio_rule_accepts_some(
    target: Callable[..., Path], assistant: Callable[..., Path]
) -> None:
    drafter = str(assistant("shared", True))
    engine = make_engine(target("shared"), drafter, acceptance_rule="rejection")
    in_batches(engine, queue(0.8), 4)
    assert 0 < engine.counts.accepted < engine.counts.nodes


def test_a_folder_names_it(target: Callable[..., Path], assistant: Callable[..., Path]) -> None:
    folder = assistant("shared")
    spec = find_drafter(folder, target("shared"))
    assert isinstance(spec, AssistantSpec)
    group = find_drafter(f"auto+{folder}", target("shared"))
    assert [each.name for each in group.members] == ["suffix", "assistant"]
    kind, facts = check(folder, target("shared"))
    assert kind == "assistant"
    assert all(fact.fits for fact in facts)


MISFITS = {
    "width": {"backbone_hidden_size": 24},
    "vocabulary": {"vocab_size": 240},
    f"heads of {SLIDING}": {"head_dim": 12},
    f"heads of {FULL}": {"global_head_dim": 24},
}


@pytest.mark.parametrize("what", MISFITS)
def test_another_targets_is_refused(what: str, target: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_assistant(tmp_path / "other", "shared", **MISFITS[what])
    _, facts = check(folder, target("shared"))
    assert [fact.what for fact in facts if not fact.fits] == [what]
    said = rf"does not fit the target \({what}: .*\); give the assistant of this target"
    with pytest.raises(OutriderError, match=said):
        LLM(target("shared"), drafter=folder, max_model_len=64)


def test_a_target_without_a_kind_of_layer_does_not_fit(
    target: Callable[..., Path], assistant: Callable[..., Path]
) -> None:
    own, other = (open_checkpoint(each).config for each in (assistant("shared"), target("shared")))
    other.layer_types = [FULL] * 4
    wrong = [pair for pair in pairs(own, other) if not pair.fits]
    assert [(pair.what, pair.theirs) for pair in wrong] == [(f"heads of {SLIDING}", "none")]


def test_other_families_are_refused(
    tiny_llama: Path, assistant: Callable[..., Path], target: Callable[..., Path]
) -> None:
    folder = assistant("shared")
    _, facts = check(folder, tiny_llama)
    assert [fact.what for fact in facts if not fact.fits] == ["family"]
    with pytest.raises(OutriderError, match="the assistant of a Gemma 4, and the target is a"):
        LLM(tiny_llama, drafter=folder, max_model_len=64)
    with pytest.raises(OutriderError, match="leave drafter_quantization out"):
        LLM(target("shared"), drafter=folder, drafter_quantization="int8", max_model_len=64)


def test_damaged_tensors_are_told(target: Callable[..., Path], tmp_path: Path) -> None:
    def damaged(name: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
        folder = make_assistant(tmp_path / name, "shared", True)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    lost, order = "model.layers.1.self_attn.q_proj.weight", "masked_embedding.token_ordering"
    holed = damaged("holed", lambda tensors: tensors.pop(lost))
    twice = damaged("twice", lambda tensors: tensors[order].fill_(3))
    _, facts = check(holed, target("shared"))
    assert [fact.what for fact in facts if not fact.fits] == [f"tensor {lost}"]
    for folder, said in ((holed, lost), (twice, "does not hold each id once")):
        with pytest.raises(OutriderError, match=said):
            LLM(target("shared"), drafter=folder, max_model_len=64)
    config = read_object(twice / "config.json")
    (twice / "config.json").write_text(json.dumps(config | {"num_centroids": 25}))
    with pytest.raises(OutriderError, match="do not fall into num_centroids = 25 groups"):
        LLM(target("shared"), drafter=twice, max_model_len=64)
