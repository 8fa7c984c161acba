"""The MTP layer of GLM-4.5, a mixture of experts, in folders and in GGUF files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from outrider import LLM, SamplingParams
from outrider.checkpoints.files import Files
from outrider.drafters.check import check_mtp
from outrider.drafters.mtp import MtpSpec
from outrider.drafters.registry import GroupSpec, find_drafter
from outrider.errors import ConfigError, OutriderError
from outrider.models.native_mtp import NativeMtp
from outrider.models.rows import Segment
from outrider.native import choice as native
from outrider.ops.diagnose.doctor import doctor
from tests.support.gguf_mixtures import convert_mixture
from tests.support.ggufs import byte_level, mtp_metadata
from tests.support.loading import native_model
from tests.support.mtp import Reference, make_mtp
from tests.support.native_steps import HERE, step

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native step is off")

MakeCheckpoint = Callable[..., Path]
FAMILY, BEGINS = "glm4_moe", "model.layers.2."
IDS = np.random.default_rng(1).integers(3, 300, 30).tolist()
LOST = "promises 1, but none of its files holds one, so this copy has lost them"


@pytest.fixture(scope="module")
def folder(make_checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mtp(make_checkpoint, tmp_path_factory.mktemp(FAMILY), FAMILY)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder, FAMILY)


def write(source: Path, path: Path, skip: str = "nothing") -> Path:
    """``source`` as a GGUF file whose metadata promise one MTP layer."""
    tokenizer, more = byte_level(), mtp_metadata(2, "glm4moe")

    def fill(writer: GGUFWriter) -> None:
        tokenizer(writer)
        more(writer)

    return convert_mixture(source, path, Kind.F32, fill=fill, skip=skip)[0]


@pytest.fixture(scope="module", params=["inside", "beside"])
def gguf_file(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A GGUF file that has the layer, or beside which another one has it."""
    into = tmp_path_factory.mktemp("files")
    if request.param == "inside":
        return write(folder, into / "model.gguf")
    write(folder, into / "mtp-model.gguf", skip=r"layers\.[01]\.")
    return write(folder, into / "model.gguf", skip=r"layers\.2\.")


def changed(folder: Path, to: Path, **parts: torch.Tensor | None) -> Path:
    """A copy of a checkpoint in which ``parts`` of the layer are others; None: without them."""
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    for part, tensor in parts.items():
        for name in [n for n in tensors if n.startswith(BEGINS) and part in n]:
            del tensors[name]
            if tensor is not None:
                tensors[name] = tensor
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def logits_of(folder: Path, states: torch.Tensor) -> NDArray[np.float32]:
    """What the layer of a checkpoint or of a GGUF file says after ``IDS``."""
    spec = find_drafter("mtp", folder)
    assert isinstance(spec, MtpSpec)
    target = native_model(step(HERE[-1]), folder, "float32", 256)
    mine = NativeMtp(spec.files, target, 256, None)
    rows = len(states)
    row = Segment(IDS[1:], 1, range(1, 8), rows, rows, first=1, states=states.numpy())
    logits = mine.run([row], mine.new_store(8, 16)).logits
    assert logits is not None
    return np.array(logits)


@pytest.mark.parametrize("part", ["eh_proj", "enorm", "hnorm", "shared_head.norm"])
def test_the_order_of_the_halves_and_each_norm_count(
    part: str, folder: Path, reference: Reference, tmp_path: Path
) -> None:
    """Swapped halves, or one norm less, are far from transformers' layer."""
    own = load_file(folder / "model.safetensors")[f"{BEGINS}{part}.weight"]
    other = own.roll(own.shape[1] // 2, 1) if part == "eh_proj" else torch.ones_like(own)
    states = reference.states(IDS)[:-1]
    expected = reference(IDS, states)[0].numpy()
    np.testing.assert_allclose(logits_of(folder, states), expected, atol=2e-4, rtol=0)
    wrong = logits_of(changed(folder, tmp_path / "copy", **{part: other}), states)
    assert np.abs(wrong - expected).max() > 0.1


def test_the_state_of_a_drafted_token_is_a_norms(folder: Path, reference: Reference) -> None:
    """As the target's states are. Without the norm the next application says something else."""
    states, known = reference.states(IDS)[:-1], IDS[:-1]
    _, after = reference(known, states[:-1])
    before = reference.before
    given = [torch.cat([states[:-1], own[-1:]]) for own in (after, before)]
    right, wrong = (reference(IDS, each)[0][-1].numpy() for each in given)
    target = native_model(step(HERE[-1]), folder, "float32", 256)
    mine = NativeMtp(Files(folder), target, 256, None)
    store, last = mine.new_store(8, 16), mine.hidden_layers
    row = Segment(known[1:], 1, range(1, 8), 1, 30, first=1, states=states[:-1].numpy())
    own = mine.run([row], store, (last,)).hidden[last][-1:]
    more = Segment(IDS[-1:], len(known), range(1, 8), 1, 30, first=1, states=own)
    logits = mine.run([more], store).logits
    assert logits is not None
    np.testing.assert_allclose(logits[0], right, atol=2e-4, rtol=0)
    assert np.abs(logits[0] - wrong).max() > 0.1


def test_gguf_files_have_the_same_layer(gguf_file: Path, folder: Path) -> None:
    states = torch.randn(len(IDS) - 1, 32, generator=torch.Generator().manual_seed(0))
    np.testing.assert_allclose(
        logits_of(gguf_file, states), logits_of(folder, states), atol=1e-4, rtol=0
    )
    for source in (folder, gguf_file):
        auto = find_drafter("auto", source)
        assert isinstance(auto, GroupSpec)
        assert [each.name for each in auto.members] == ["mtp", "suffix"]
        assert all(fact.fits for fact in check_mtp(source)[1])


def test_drafts_of_gguf_files_change_no_token(gguf_file: Path) -> None:
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=30, ignore_eos=True)
    plain, drafted = (
        LLM(gguf_file, drafter=drafter, max_model_len=128).generate(["for word in", "x"], params)
        for drafter in ("none", "mtp")
    )
    for one, other in zip(plain, drafted, strict=True):
        assert other.outputs[0].token_ids == one.outputs[0].token_ids
        assert other.metrics.drafted > 0


@pytest.mark.parametrize("kind", ["folder", "GGUF file"])
def test_a_copy_that_has_lost_the_layer_is_told(kind: str, folder: Path, tmp_path: Path) -> None:
    if kind == "folder":
        lost = changed(folder, tmp_path / "lost", **{BEGINS: None})
    else:
        lost = write(folder, tmp_path / "lost.gguf", skip=r"layers\.2\.")
    (fact,) = check_mtp(lost)[1]
    assert not fact.fits
    assert LOST in fact.drafter
    with pytest.raises(ConfigError, match=LOST):
        find_drafter("mtp", lost)
    told = [finding for finding in doctor(str(lost), port=0) if "MTP" in finding.what]
    assert [(each.status, LOST in each.found) for each in told] == [("warn", True)]
    assert len(LLM(lost, max_model_len=64).generate("abc")) == 1


@pytest.mark.parametrize("part", ["mlp.shared_experts.up_proj", "mlp.experts.3.down_proj"])
def test_a_lost_part_of_the_mixture_is_named(part: str, folder: Path, tmp_path: Path) -> None:
    """A shared expert also by the check, which does not read experts."""
    holed, name = changed(folder, tmp_path / "holed", **{part: None}), f"{BEGINS}{part}.weight"
    with pytest.raises(OutriderError, match=name):
        LLM(holed, drafter="mtp", max_model_len=64)
    wrong = [fact.what for fact in check_mtp(holed)[1] if not fact.fits]
    assert wrong == ([f"tensor {name}"] if "shared" in part else [])
