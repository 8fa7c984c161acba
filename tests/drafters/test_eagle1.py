"""Heads of EAGLE-1: transformers' layer behind a linear, and drafts that change no token."""

from __future__ import annotations

import json
from array import array
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from outrider.checkpoints.heads import EAGLE1, read_head
from outrider.models.native_eagle1 import NativeEagle1
from outrider.models.rows import Segment
from outrider.native import choice as native
from tests.support.commands import outrider
from tests.support.head_checks import Change, add, changes_no_token, drop, is_refused, put, saved
from tests.support.loading import native_model
from tests.support.native_steps import HERE, step

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native step is off")
LAYERS = {"llama": LlamaDecoderLayer, "qwen2": Qwen2DecoderLayer}
"""Whose layer a head has."""


class Reference(nn.Module):
    """EAGLE-1 as SafeAILab's code defines it, over a whole sequence."""

    def __init__(self, target: Path, family: str, bias: bool, embeds: bool) -> None:
        super().__init__()
        self.target = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        of = self.target.config
        self.config = AutoConfig.for_model(
            family, hidden_size=of.hidden_size, vocab_size=of.vocab_size, num_hidden_layers=1,
            num_attention_heads=4, num_key_value_heads=2, intermediate_size=96, rope_theta=5000.0,
            max_position_embeddings=256, rms_norm_eps=1e-5, attn_implementation="eager",
        )  # fmt: skip
        width = of.hidden_size
        torch.manual_seed(5)
        self.embed_tokens, self.fc = nn.Embedding(of.vocab_size, width), nn.Linear(2 * width, width)
        self.fc.bias = self.fc.bias if bias else None
        self.layer = LAYERS[family](self.config, 0)
        self.layer.input_layernorm = nn.Identity()
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if not name.startswith("target."):
                    scale = 1.0 if "norm" in name or weight.dim() == 1 else weight.shape[1] ** -0.5
                    weight.copy_(torch.randn_like(weight) * scale)
            if not embeds:
                self.embed_tokens.weight.copy_(self.target.model.embed_tokens.weight)

    def save(self, folder: Path, layout: str = "safeailab", change: Change | None = None) -> Path:
        """Save the head, as SafeAILab names its parts, with a config of theirs or of vLLM's."""
        own = {n: t for n, t in self.state_dict().items() if not n.startswith("target.")}
        tensors = {n.replace("layer.", "layers.0.", 1): t.clone() for n, t in own.items()}
        config = {**self.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
        if layout == "vllm":
            config = {"architectures": ["EAGLEModel"], "model_type": "eagle", "model": config}
        return saved(folder, config, tensors, change)

    @torch.no_grad()
    def states(self, ids: list[int]) -> Tensor:
        """What the target's last norm gives."""
        return self.target.model(torch.tensor([ids])).last_hidden_state[0]

    @torch.no_grad()
    def forward(self, ids: list[int], states: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and states behind the tokens from the second one on, of states before them."""
        x = self.fc(torch.cat([self.embed_tokens(torch.tensor([ids[1:]])), states[None]], -1))
        places = torch.arange(1, len(ids))[None]
        mask = torch.full((len(ids) - 1,) * 2, -torch.inf).triu(1)[None, None]
        turns = LlamaRotaryEmbedding(self.config)(x, places)
        x = self.layer(x, position_embeddings=turns, attention_mask=mask, position_ids=places)
        x = x[0] if isinstance(x, tuple) else x
        return self.target.lm_head(x)[0], x.reshape(-1, x.shape[-1])


def agrees(reference: Reference, folder: Path, target: Path, isa: str = HERE[-1]) -> None:
    """A head computes what its reference does, and makes the states that rows begin with."""
    ids = np.random.default_rng(1).integers(3, 300, 40).tolist()
    states = reference.states(ids)[:-1]
    expected, after = reference(ids, states)
    model, head = native_model(step(isa), target, "float32", 256), read_head(folder)
    assert head is not None
    mine = NativeEagle1(head, model, 256, None)
    row = Segment(ids[1:], 1, range(1, 8), len(ids) - 1, 40, first=1, states=states.numpy())
    found = mine.run([row], mine.new_store(8, 16), (mine.hidden_layers,))
    np.testing.assert_allclose(found.logits, expected, atol=5e-4, rtol=1e-4)
    np.testing.assert_allclose(found.hidden[mine.hidden_layers], after, atol=5e-4, rtol=1e-4)
    (last,) = mine.target_layers
    own = model.run([Segment(ids, 0, range(1, 8), 1, 40)], model.new_store(8, 16), (last,))
    made, every = np.empty((len(ids) - 1, mine.hidden_size), np.float32), array("i", range(39))
    mine.fuse([own.hidden[last]], every, made, every)
    np.testing.assert_allclose(made, states, atol=2e-4, rtol=0)


@pytest.mark.parametrize("isa", HERE)
@pytest.mark.parametrize(
    ("family", "bias", "embeds", "layout"),
    [
        ("llama", True, True, "safeailab"),
        ("llama", False, False, "vllm"),
        ("qwen2", False, True, "vllm"),
        ("qwen2", True, False, "safeailab"),
    ],
)
def test_a_head_computes_what_the_defining_code_does(
    isa: str, family: str, bias: bool, embeds: bool, layout: str, tiny_llama: Path, tmp_path: Path
) -> None:
    reference = Reference(tiny_llama, family, bias, embeds)
    agrees(reference, reference.save(tmp_path / "head", layout), tiny_llama, isa)


def turned(name: str) -> Change:
    """Swap the halves of a matrix's columns."""
    return lambda config, tensors: tensors.update(
        {name: torch.cat(tensors[name].chunk(2, 1)[::-1], 1)}
    )


MUTATIONS: dict[str, Change] = {
    "embedding before state": turned("fc.weight"),
    "bias": lambda config, tensors: tensors.pop("fc.bias"),
    "embedding of its own": lambda config, tensors: tensors.pop("embed_tokens.weight"),
    "rope": lambda config, tensors: config.update(rope_parameters=None, rope_theta=100.0),
    "eps": lambda config, tensors: config.update(rms_norm_eps=0.5),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_every_convention_counts(mutation: str, tiny_llama: Path, tmp_path: Path) -> None:
    reference = Reference(tiny_llama, "llama", True, True)
    folder = reference.save(tmp_path / "head", change=MUTATIONS[mutation])
    with pytest.raises(AssertionError):
        agrees(reference, folder, tiny_llama)


def test_norms_count(tiny_llama: Path, tmp_path: Path) -> None:
    reference = Reference(tiny_llama, "llama", True, True)
    folder = reference.save(tmp_path / "head")
    reference.layer.input_layernorm = nn.RMSNorm(reference.config.hidden_size)
    with pytest.raises(AssertionError):
        agrees(reference, folder, tiny_llama)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_change_no_token(temperature: float, tiny_llama: Path, tmp_path: Path) -> None:
    folder = Reference(tiny_llama, "llama", True, False).save(tmp_path / "head")
    changes_no_token(tiny_llama, folder, "eagle", temperature)


WRONG: dict[str, tuple[str, Change]] = {
    "a norm of embeddings": ("enorm.weight", add("enorm.weight", 64)),
    "a norm before the layer": ("input_layernorm", add("layers.0.input_layernorm.weight", 64)),
    "a short bias": ("fc.bias", add("fc.bias", 3)),
    "a narrow linear": ("fc.weight", add("fc.weight", 64, 64)),
    "no norm": ("post_attention_layernorm", drop("layers.0.post_attention_layernorm.weight")),
    "no queries": ("q_proj", drop("layers.0.self_attn.q_proj.weight")),
    "another vocabulary": ("vocabulary of 999", put(vocab_size=999)),
    "another family": ("model_type", put(model_type="gpt2")),
    "no config of a layer": ("model", put(model_type="eagle", model=None)),
    "a list for a config": ("model", put(model_type="eagle", model=[1])),
    "2**31 layers": (
        "2147483648",
        lambda c, t: c.update(model_type="eagle", model={**c, "num_hidden_layers": 2**31}),
    ),
    "2 layers": (
        "layers.1",
        lambda c, t: c.update(model_type="eagle", model={**c, "num_hidden_layers": 2}),
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_damaged_head_is_refused_in_one_sentence(
    wrong: str, tiny_llama: Path, tmp_path: Path
) -> None:
    named, change = WRONG[wrong]
    folder = Reference(tiny_llama, "llama", True, True).save(tmp_path / "head", change=change)
    is_refused(tiny_llama, folder, named)


def test_a_quantised_copy_drafts_the_same(tiny_llama: Path, tmp_path: Path) -> None:
    folder = Reference(tiny_llama, "llama", True, True).save(tmp_path / "head")
    done = outrider("quantize", folder, tmp_path / "small", "--quantization", "int8")
    assert done.exit_code == 0, done.output
    head = read_head(tmp_path / "small")
    assert head is not None
    assert head.kind == EAGLE1
    model = native_model(step(HERE[-1]), tiny_llama, "float32", 256)
    first = read_head(folder)
    assert first is not None
    ids, states = [*range(5, 15)], np.random.default_rng(2).normal(size=(9, model.hidden_size))
    row = Segment(ids[1:], 1, range(1, 8), 9, 10, first=1, states=states.astype(np.float32))
    kept, made = (
        each.run([row], each.new_store(8, 16)).logits
        for each in (NativeEagle1(head, model, 256, None), NativeEagle1(first, model, 256, "int8"))
    )
    assert np.array_equal(kept, made)


def test_it_is_neither_exported_nor_trained(tiny_llama: Path, tmp_path: Path) -> None:
    folder = Reference(tiny_llama, "llama", True, True).save(tmp_path / "head")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "for word in the"}) + "\n")
    for command in (
        ("export", folder, tmp_path / "other"),
        (
            "adapt",
            "--target",
            tiny_llama,
            "--drafter",
            folder,
            "-o",
            tmp_path / "work",
            "--prompts",
            prompts,
        ),
    ):
        done = outrider("train", *command)
        assert done.exit_code == 2, done.output
        assert "EAGLE-1" in done.stderr
        assert "Traceback" not in done.output
