"""MTP layers inside a checkpoint: transformers' layers, and drafts that change no token."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

from outrider import LLM, SamplingParams
from outrider.base.fields import read_object
from outrider.base.types import DraftBudget
from outrider.checkpoints.files import Files
from outrider.drafters import likely
from outrider.drafters.base import NoSpec
from outrider.drafters.check import check_mtp
from outrider.drafters.mtp import MtpSpec
from outrider.drafters.registry import GroupSpec, find_drafter
from outrider.errors import ConfigError
from outrider.models.decide import DraftInput
from outrider.models.native_mtp import NativeMtp
from outrider.models.rows import Segment
from outrider.native import choice as native
from outrider.native.native_sampling import NativeNoise
from outrider.ops.diagnose.doctor import doctor
from tests.support.ggufs import byte_level, convert, mtp_metadata
from tests.support.loading import native_model
from tests.support.native_steps import HERE, sequence_of, step
from tests.support.tiny import VOCABULARY

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native step is off")

MakeCheckpoint = Callable[..., Path]
OPTIONS: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"], "head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(make_checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_checkpoint(
        tmp_path_factory.mktemp("mtp"), "qwen3_5_text", tokenizer=True, **OPTIONS
    )
    tensors = load_file(made / "model.safetensors")
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    width = tensors["model.norm.weight"].shape[0]
    for name in [name for name in tensors if ".layers.1." in name]:
        own = name.replace("model.layers.1.", "mtp.layers.0.")
        scaled = tensors[name] if tensors[name].ndim == 1 else random(*tensors[name].shape)
        tensors[own] = scaled.clone()
    tensors["mtp.fc.weight"] = random(width, 2 * width)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{name}.weight"] = 0.3 * torch.randn(width, generator=generator)
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    return made


class Reference:
    """The layers in torch, of transformers' decoder layer, over whole sequences."""

    def __init__(self, folder: Path) -> None:
        self.target = AutoModelForCausalLM.from_pretrained(folder).eval()
        config, tensors = self.target.config, load_file(folder / "model.safetensors")
        self.tensors = {n.removeprefix("mtp."): t for n, t in tensors.items() if "mtp." in n}
        self.layer = Qwen3_5DecoderLayer(config, config.layer_types.index("full_attention"))
        begins = "layers.0."
        self.layer.load_state_dict(
            {n.removeprefix(begins): t for n, t in self.tensors.items() if n.startswith(begins)}
        )
        self.eps, self.width = config.rms_norm_eps, config.hidden_size

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        norm = Qwen3_5RMSNorm(self.width, self.eps)
        norm.weight.data.copy_(self.tensors[f"{name}.weight"])
        return norm(x)

    @torch.no_grad()
    def __call__(self, ids: list[int], states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and states behind the tokens from the second one on, of states before them."""
        model, later = self.target.model, torch.tensor([ids[1:]])
        both = (
            self.norm("pre_fc_norm_embedding", model.embed_tokens(later)),
            self.norm("pre_fc_norm_hidden", states[None]),
        )
        x = torch.cat(both, -1) @ self.tensors["fc.weight"].T
        places = torch.arange(1, len(ids))[None]
        mask = torch.full((len(ids) - 1,) * 2, -torch.inf).triu(1)[None, None]
        turns = model.rotary_emb(x, places)
        x = self.layer(x, position_embeddings=turns, attention_mask=mask, position_ids=places)
        x = self.norm("norm", x[0] if isinstance(x, tuple) else x)
        return self.target.lm_head(x)[0], x[0]

    @torch.no_grad()
    def states(self, ids: list[int]) -> torch.Tensor:
        return self.target.model(torch.tensor([ids])).last_hidden_state[0]


def ids_of(length: int) -> list[int]:
    return np.random.default_rng(1).integers(3, 300, length).tolist()


@pytest.mark.parametrize("isa", HERE)
def test_they_are_transformers_layers(isa: str, folder: Path) -> None:
    reference, ids = Reference(folder), ids_of(40)
    states = reference.states(ids)[:-1]
    expected, after = reference(ids, states)
    target = native_model(step(isa), folder, "float32", 256)
    mine = NativeMtp(Files(folder), target, 256, None)
    store = mine.new_store(8, 16)
    row = Segment(ids[1:], 1, range(1, 8), len(ids) - 1, 40, first=1, states=states.numpy())
    found = mine.run([row], store, (mine.hidden_layers,))
    np.testing.assert_allclose(found.logits, expected, atol=2e-4, rtol=0)
    np.testing.assert_allclose(found.hidden[mine.hidden_layers], after, atol=2e-4, rtol=0)
    # What the target's last layer gives becomes the states that rows begin with.
    last = target.hidden_layers - 1
    own = target.run([Segment(ids, 0, range(1, 8), 1, 40)], target.new_store(8, 16), (last,))
    made = np.empty((len(ids) - 1, mine.hidden_size), np.float32)
    every = array("i", range(len(ids) - 1))
    mine.fuse([own.hidden[last]], every, made, every)
    np.testing.assert_allclose(made, states, atol=2e-4, rtol=0)


def test_a_checkpoint_with_mtp_layers_has_a_drafter(folder: Path, tiny_llama: Path) -> None:
    auto = find_drafter("auto", folder)
    assert isinstance(auto, GroupSpec)
    assert [each.name for each in auto.members] == ["mtp", "suffix"]
    assert isinstance(find_drafter("mtp", folder), MtpSpec)
    other = find_drafter("auto", tiny_llama)
    assert isinstance(other, GroupSpec)
    assert "mtp" not in [each.name for each in other.members]
    assert find_drafter("none", folder) == NoSpec()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("listed", [False, True])
def test_drafts_change_no_token(
    temperature: float, listed: bool, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whether they come from all ids, or from a list of likely ones."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(likely, "pays", lambda shape: listed)
    monkeypatch.setattr(likely, "SIZE", VOCABULARY // 3)
    prompts = ["for word in the", "def greet(name): return f", "abc abc abc", "x"]
    params = [
        SamplingParams(temperature=temperature, max_tokens=40, seed=i, ignore_eos=True)
        for i in range(len(prompts))
    ]

    def outputs(drafter: str, **options: Any) -> list[list[int]]:
        llm = LLM(folder, drafter=drafter, max_model_len=128, **options)
        return [[*each.outputs[0].token_ids] for each in llm.generate(prompts, params)]

    plain = outputs("none")
    for options in ({"num_speculative_tokens": 4}, {}, {"max_num_batched_tokens": 16}):
        assert outputs("mtp", **options) == plain
    assert outputs("auto") == plain


def test_drafts_of_a_gguf_file_change_no_token(gguf_file: Path) -> None:
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=30, ignore_eos=True)
    plain, drafted = (
        LLM(gguf_file, drafter=drafter, max_model_len=128).generate(["for word in"], params)
        for drafter in ("none", "mtp")
    )
    assert drafted[0].outputs[0].token_ids == plain[0].outputs[0].token_ids
    assert drafted[0].metrics.drafted > 0


@pytest.fixture(scope="module", params=["inside", "beside"])
def gguf_file(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The checkpoint as a GGUF file that has the layers, or beside which another one has them."""
    into, layers = tmp_path_factory.mktemp("files"), len(OPTIONS["layer_types"])
    tokenizer, more = byte_level(), mtp_metadata(layers)

    def fill(writer: GGUFWriter) -> None:
        tokenizer(writer)
        more(writer)

    if request.param == "inside":
        return convert(folder, into / "model.gguf", Kind.F32, fill)[0]
    convert(folder, into / "mtp-model.gguf", Kind.F32, fill, skip="model.layers")
    return convert(folder, into / "model.gguf", Kind.F32, tokenizer, skip="mtp.")[0]


def test_gguf_files_have_the_same_layers(gguf_file: Path, folder: Path) -> None:
    ids = ids_of(40)
    found = []
    for source in (folder, gguf_file):
        spec = find_drafter("mtp", source)
        assert isinstance(spec, MtpSpec)
        target = native_model(step(HERE[-1]), source, "float32", 256)
        mine = NativeMtp(spec.files, target, 256, None)
        states = np.random.default_rng(0).normal(size=(39, mine.hidden_size)).astype(np.float32)
        row = Segment(ids[1:], 1, range(1, 8), 39, 40, first=1, states=states)
        logits = mine.run([row], mine.new_store(8, 16)).logits
        assert logits is not None
        found.append(logits)
    ours, theirs = found
    np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)
    auto = find_drafter("auto", gguf_file)
    assert isinstance(auto, GroupSpec)
    assert [each.name for each in auto.members] == ["mtp", "suffix"]


def test_another_models_file_is_no_companion(gguf_file: Path, tmp_path: Path) -> None:
    """Its layers would stand behind others, or it is one of several."""
    target, layers = tmp_path / "model.gguf", gguf_file.parent / "mtp-model.gguf"
    target.write_bytes(gguf_file.read_bytes())
    if not layers.is_file():
        return
    for name in ("mtp-a.gguf", "mtp-b.gguf"):
        (tmp_path / name).write_bytes(layers.read_bytes())
        assert (MtpSpec.inside(Files(target)) is None) == (name == "mtp-b.gguf")


def test_what_lacks_its_layers_is_told(folder: Path, tmp_path: Path) -> None:
    """A copy that lost them all, one that lost a tensor, and one that never had any."""
    kind, facts = check_mtp(folder)
    assert kind == "mtp"
    assert all(fact.fits for fact in facts)
    tensors, config = load_file(folder / "model.safetensors"), read_object(folder / "config.json")

    def copy(name: str, keep: Callable[[str], bool], promised: int) -> Path:
        made = tmp_path / name
        made.mkdir()
        for file in folder.iterdir():
            (made / file.name).write_bytes(file.read_bytes())
        kept = {n: t for n, t in tensors.items() if keep(n)}
        save_file(kept, made / "model.safetensors", metadata={"format": "pt"})
        text = json.dumps(config | {"mtp_num_hidden_layers": promised})
        (made / "config.json").write_text(text)
        return made

    lost = copy("lost", lambda n: not n.startswith("mtp."), 1)
    (fact,) = check_mtp(lost)[1]
    assert not fact.fits
    assert "promises 1, but none of its files holds one" in fact.drafter
    with pytest.raises(ConfigError, match="has no MTP layers to draft with: its config promises"):
        find_drafter("mtp", lost)
    told = [finding for finding in doctor(str(lost), port=0) if "MTP" in finding.what]
    assert [finding.status for finding in told] == ["warn"]
    holed = copy("holed", lambda n: "mtp.layers.0.mlp.up_proj" not in n, 1)
    wrong = [fact.what for fact in check_mtp(holed)[1] if not fact.fits]
    assert wrong == ["tensor mtp.layers.0.mlp.up_proj.weight"]
    never = copy("never", lambda n: not n.startswith("mtp."), 0)
    assert "published without any" in check_mtp(never)[1][0].drafter


@pytest.mark.parametrize("isa", HERE)
def test_chains_go_on_from_their_own_states(isa: str, folder: Path) -> None:
    """A greedy draft is what the layers say, token by token, of what they drafted."""
    reference, library = Reference(folder), step(isa)
    target = native_model(library, folder, "float32", 256)
    mine = NativeMtp(Files(folder), target, 256, None)
    noise, sequence = NativeNoise(VOCABULARY, library), sequence_of(target, 1, temperature=0)
    ids = [*sequence.tokens]
    states = reference.states(ids)[:-1]
    row = Segment(ids[1:], 1, range(1, 8), 1, len(ids), first=1, states=states.numpy())
    asked = DraftInput(sequence, DraftBudget(4, 4))
    (draft,) = mine.draft([row], mine.new_store(8, 16), [asked], noise)
    expected: list[int] = []
    for _ in range(4):
        logits, after = reference([*ids, *expected], states)
        expected.append(int(logits[-1].argmax()))
        states = torch.cat([states, after[-1:]])
    assert draft.tokens == expected
