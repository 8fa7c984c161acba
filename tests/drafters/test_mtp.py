"""MTP layers inside a checkpoint: transformers' layers, and drafts that change no token."""

from __future__ import annotations

import functools
import json
import re
import shutil
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

from outrider import LLM, SamplingParams
from outrider.base.fields import read_object
from outrider.base.types import DraftBudget
from outrider.checkpoints.files import Files
from outrider.checkpoints.gguf_export import export_gguf
from outrider.drafters import likely
from outrider.drafters.base import NoSpec
from outrider.drafters.check import check_mtp
from outrider.drafters.mtp import MtpSpec
from outrider.drafters.registry import GroupSpec, find_drafter
from outrider.errors import ConfigError, OutriderError
from outrider.models.decide import DraftInput
from outrider.models.native_mtp import NativeMtp
from outrider.models.rows import Segment
from outrider.native import choice as native
from outrider.native.native_sampling import NativeNoise
from outrider.ops.diagnose.doctor import doctor
from tests.support.ggufs import byte_level, convert, mtp_metadata
from tests.support.loading import native_model
from tests.support.mtp import LIKE, OPTIONS, Reference, make_mtp, own_name
from tests.support.native_steps import HERE, sequence_of, step
from tests.support.tiny import VOCABULARY

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native step is off")

MakeCheckpoint = Callable[..., Path]
FAMILY = "qwen3_5_text"
OTHERS = ("exaone4", "mimo", "glm4_moe")


@pytest.fixture(scope="module")
def folders(
    make_checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    return functools.cache(
        lambda family: make_mtp(make_checkpoint, tmp_path_factory.mktemp(family), family)
    )


@pytest.fixture(scope="module")
def folder(folders: Callable[[str], Path]) -> Path:
    return folders(FAMILY)


def ids_of(length: int) -> list[int]:
    return np.random.default_rng(1).integers(3, 300, length).tolist()


@pytest.mark.parametrize("family", LIKE)
@pytest.mark.parametrize("isa", HERE)
def test_they_are_transformers_layers(
    isa: str, family: str, folders: Callable[[str], Path]
) -> None:
    folder = folders(family)
    reference, ids = Reference(folder, family), ids_of(40)
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


@pytest.mark.parametrize("family", OTHERS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_of_other_families_change_no_token(
    temperature: float, family: str, folders: Callable[[str], Path]
) -> None:
    """Those of a quantised target and of int8 layers among them; `auto` finds them."""
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=30, ignore_eos=True)
    batches = [["for word in the"], ["for word in the", "x", "abc abc abc", "def greet(name)"]]
    for options in ({}, {"quantization": "int4"}):
        engines = [
            LLM(folders(family), max_model_len=128, **options, **drafts)
            for drafts in (
                {"drafter": "none"},
                {"drafter": "mtp", "num_speculative_tokens": 3},
                {"drafter": "auto"},
            )
        ]
        for prompts in batches:
            plain, drafted, auto = (llm.generate(prompts, params) for llm in engines)
            for one, other, third in zip(plain, drafted, auto, strict=True):
                assert other.outputs[0].token_ids == one.outputs[0].token_ids
                assert third.outputs[0].token_ids == one.outputs[0].token_ids
                assert other.metrics.drafted > 0


@pytest.mark.parametrize("family", OTHERS)
def test_what_other_families_lack_has_the_names_of_their_files(
    family: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    holed = tmp_path / "holed"
    shutil.copytree(folders(family), holed)
    assert all(fact.fits for fact in check_mtp(holed)[1])
    lacks = [own_name(family, f"{part}.weight") for part in ("fc", "layers.0.self_attn.o_proj")]
    tensors = load_file(holed / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if name not in lacks[1:]}
    save_file(kept, holed / "model.safetensors", metadata={"format": "pt"})
    assert [fact.what for fact in check_mtp(holed)[1] if not fact.fits] == [f"tensor {lacks[1]}"]
    with pytest.raises(OutriderError, match=re.escape(lacks[1])):
        LLM(holed, drafter="mtp", max_model_len=64)
    save_file(
        {n: t for n, t in tensors.items() if n != lacks[0]}, holed / "model.safetensors",
        metadata={"format": "pt"},
    )  # fmt: skip
    assert MtpSpec.inside(Files(holed)) is None
    (fact,) = check_mtp(holed)[1]
    assert f"its MTP layers lack {lacks[0]}" in fact.drafter


def test_a_further_layer_of_its_own_is_left_alone(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """MiMo's second layer predicts the token after next from the first one's state."""
    more = tmp_path / "more"
    shutil.copytree(folders("mimo"), more)
    tensors = load_file(more / "model.safetensors")
    for name in [name for name in tensors if ".mtp_layers.0." in name]:
        tensors[name.replace("layers.0.", "layers.1.")] = torch.full_like(tensors[name], 9.0)
    save_file(tensors, more / "model.safetensors", metadata={"format": "pt"})
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    (few,), (same,) = (
        LLM(each, drafter="mtp", num_speculative_tokens=2, max_model_len=64).generate("ab", params)
        for each in (folders("mimo"), more)
    )
    assert (same.metrics.drafted, same.metrics.accepted) == (
        few.metrics.drafted, few.metrics.accepted
    )  # fmt: skip


def test_a_gguf_file_that_lacks_the_layer_is_told(
    folders: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    export_gguf(folders("mimo"), tmp_path / "mimo.gguf", "F16")
    assert "its MTP layers are left out of the file" in caplog.text
    assert len(LLM(tmp_path / "mimo.gguf", max_model_len=64).generate("ab")) == 1


def test_a_gguf_file_of_exaone_has_the_same_layer(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, tokenizer, more = folders("exaone4"), byte_level(), mtp_metadata(2, "exaone4")

    def fill(writer: GGUFWriter) -> None:
        tokenizer(writer)
        more(writer)

    path, _ = convert(folder, tmp_path / "model.gguf", Kind.F32, fill)
    assert_same_layer(folder, path)


@pytest.fixture(scope="module", params=["inside", "beside"])
def gguf_file(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The checkpoint as a GGUF file that has the layers, or beside which another one has them."""
    into, layers = tmp_path_factory.mktemp("files"), len(OPTIONS[FAMILY]["layer_types"])
    tokenizer, more = byte_level(), mtp_metadata(layers)

    def fill(writer: GGUFWriter) -> None:
        tokenizer(writer)
        more(writer)

    if request.param == "inside":
        return convert(folder, into / "model.gguf", Kind.F32, fill)[0]
    convert(folder, into / "mtp-model.gguf", Kind.F32, fill, skip="model.layers")
    return convert(folder, into / "model.gguf", Kind.F32, tokenizer, skip="mtp.")[0]


def assert_same_layer(folder: Path, gguf_file: Path) -> None:
    """Both files' layers say the same."""
    ids, found = ids_of(40), []
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


def test_gguf_files_have_the_same_layers(gguf_file: Path, folder: Path) -> None:
    assert_same_layer(folder, gguf_file)
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


@pytest.mark.parametrize("family", LIKE)
@pytest.mark.parametrize("isa", HERE)
def test_chains_go_on_from_their_own_states(
    isa: str, family: str, folders: Callable[[str], Path]
) -> None:
    """A greedy draft is what the layers say, token by token, of what they drafted."""
    folder = folders(family)
    reference, library = Reference(folder, family), step(isa)
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


@pytest.mark.parametrize("family", LIKE)
@pytest.mark.parametrize("isa", HERE)
def test_a_refused_draft_leaves_nothing(
    isa: str, family: str, folders: Callable[[str], Path]
) -> None:
    """Each application of a draft has transformers' logits, and so have the rows read after it."""
    folder = folders(family)
    reference, ids = Reference(folder, family), ids_of(24)
    known, drafted = ids[:16], [5, 6, 7]
    target = native_model(step(isa), folder, "float32", 256)
    mine = NativeMtp(Files(folder), target, 256, None)
    store, last = mine.new_store(8, 16), mine.hidden_layers

    def read(tokens: list[int], start: int, states: torch.Tensor) -> tuple[Any, torch.Tensor]:
        rows = len(tokens)
        row = Segment(tokens, start, range(1, 8), rows, 16, first=1, states=states.numpy())
        output = mine.run([row], store, (last,))
        return np.array(output.logits), torch.from_numpy(output.hidden[last].copy())

    states = reference.states(ids)[:-1]
    given = states[:15]
    _, after = read(known[1:], 1, given)
    for depth, token in enumerate(drafted):
        given = torch.cat([given, after[-1:]])
        expected, _ = reference([*known, *drafted[: depth + 1]], given)
        logits, after = read([token], 16 + depth, given[-1:])
        np.testing.assert_allclose(logits[0], expected[-1], atol=2e-4, rtol=0)
    expected, _ = reference(ids, states)
    logits, _ = read(ids[16:], 16, states[15:])
    np.testing.assert_allclose(logits, expected[15:], atol=2e-4, rtol=0)
