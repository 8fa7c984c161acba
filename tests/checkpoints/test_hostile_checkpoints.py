"""Checkpoints that ask for more than their files hold, or for what is no number, are refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from tokenizers import Tokenizer

from outrider import LLM, SamplingParams
from outrider.base.fields import Fields
from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.checkpoints.convert import convert as converted
from outrider.checkpoints.files import Files
from outrider.checkpoints.formats.gguf import open_gguf
from outrider.checkpoints.formats.gguf_tokenizer import gguf_tokenizer
from outrider.checkpoints.formats.patterns import matches, patterns
from outrider.checkpoints.formats.shared import Tensors, read_scales
from outrider.checkpoints.rope import PART, Rope
from outrider.checkpoints.tokenizers import read_codec
from outrider.errors import ConfigError, ModelError
from outrider.models.load import load_model
from outrider.models.tensors import as_tensor
from outrider.server.build import read_defaults
from tests.support.ggufs import changed, convert, empty
from tests.support.tiny import build_checkpoint

CPU = "cpu"
Edit = Callable[..., Path]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("llama"), "llama", tokenizer=True)


@pytest.fixture
def edited(plain: Path, tmp_path: Path) -> Edit:
    """A copy of the checkpoint with other values in one of its JSON files."""

    def edit(file: str = "config.json", source: Path = plain, **values: Any) -> Path:
        folder = tmp_path / "model"
        shutil.copytree(source, folder, dirs_exist_ok=True)
        known = json.loads((folder / file).read_text()) if (folder / file).is_file() else {}
        (folder / file).write_text(json.dumps({**known, **values}))
        return folder

    return edit


def rope(**options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **options}}


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"num_hidden_layers": 10**30},
            "num_hidden_layers is 1000.*at least one for each",
        ),
        ({"num_hidden_layers": 2**33}, "num_hidden_layers is 8589934592, but its checkpoint has"),
        ({"num_hidden_layers": 2**31}, "num_hidden_layers is 2147483648, but its checkpoint has"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers is 10000000, but its checkpoint has"),
        ({"model_type": "qwen2", "num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_hidden_layers": -(10**30)}, "num_hidden_layers is -1000.*a whole number is needed"),
        ({"dtype": 1}, "dtype is 1; float32, bfloat16"),
        ({"dtype": "int8"}, "dtype is 'int8'; float32, bfloat16"),
        ({"dtype": "nn"}, "dtype is 'nn'; float32, bfloat16"),
        ({"dtype": ["float32"]}, r"dtype is .*; float32"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0|cannot be used"),
        ({"hidden_act": "x"}, "transformers cannot load it: there is no 'x'"),
        ({"head_dim": 1}, "its tensors have other shapes than its config.json says"),
        (
            {"intermediate_size": 2**31 - 1},
            "intermediate_size is 2147483647; a whole number from 1 to 1073741823",
        ),
        ({"num_attention_heads": 2**30}, "num_attention_heads is 1073741824; a whole number"),
        (
            rope(rope_type="yarn", factor=2.0, beta_fast=-1.0),
            "beta_fast is -1.0; a finite number of at least 0",
        ),
        ({"head_dim": -8}, "head_dim is -8; a whole number from 1"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0; a whole number from 1"),
        (rope(rope_theta="x"), "rope_theta is 'x'|cannot be used"),
        (rope(rope_theta=None), "rope_theta is missing|cannot be used"),
        (rope(rope_type="linear", factor=float("inf")), "factor is inf; a finite number above 0"),
        (rope(rope_type="linear", factor=float("nan")), "factor is nan; a finite number above 0"),
        (rope(rope_type="yarn", factor=1e30), r"factor is 1e\+30; a context of at most"),
        (
            {"max_position_embeddings": 2**27},
            "is 134217728, whose rotary tables take",
        ),
        ({"max_position_embeddings": 2**40}, "max_position_embeddings is 1099511627776; a whole"),
        (
            {"model_type": "mistral", "sliding_window": 2**31},
            "sliding_window is 2147483648; a",
        ),
        ({"model_type": "mistral", "sliding_window": 2**32 + 3}, "sliding_window is 4294967299; a"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; a finite number"),
        ({"vocab_size": 2**40}, "vocab_size is 1099511627776; a whole number from 1 to"),
        ({"eos_token_id": [[1]]}, "eos_token_id is|cannot be used"),
        ({"model_type": "gpt_neo", "attention_types": [[["global"], 10**9]]}, "attention_types is"),
    ],
)
def test_a_config_is_refused_before_it_costs_anything(
    values: dict[str, Any], sentence: str, edited: Edit
) -> None:
    folder = edited(**values)
    started = time.process_time()
    with pytest.raises((ModelError, ConfigError), match=sentence) as error:
        LLM(folder, drafter=None, memory="16MiB")
    assert time.process_time() - started < 10
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("ids", ["a", 1.5, [[1]], True, {}])
def test_end_tokens_are_token_ids(ids: Any, edited: Edit) -> None:
    folder = edited("generation_config.json", eos_token_id=ids)
    with pytest.raises(ModelError, match=r"generation_config.json: eos_token_id is .*is needed"):
        open_checkpoint(folder)


def test_minus_one_stands_for_no_end_token(edited: Edit) -> None:
    folder = edited("generation_config.json", eos_token_id=[-1, 5])
    assert open_checkpoint(folder).shape.eos_token_ids == {0, 5}


@pytest.mark.parametrize(
    "values", [{"top_k": 2**32}, {"max_new_tokens": 2**40}, {"temperature": "x"}, {"top_k": [1]}]
)
def test_defaults_of_sampling_are_in_range(values: dict[str, Any], edited: Edit) -> None:
    with pytest.raises(ConfigError, match=r"generation_config: .* Or give vllm for none"):
        read_defaults("auto", edited("generation_config.json", **values))


@pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", 3, "..", "x.bin", None])
def test_an_index_names_files_of_its_folder(name: Any, plain: Path, edited: Edit) -> None:
    folder = edited("model.safetensors.index.json", weight_map={"a": name})
    shutil.copy(plain / "model.safetensors", folder.parent / "x.safetensors")
    with pytest.raises(ModelError, match=r"weight_map names .*same folder is needed"):
        open_checkpoint(folder).tensors.shapes()


def test_a_file_that_shrinks_is_told_in_a_sentence(plain: Path, tmp_path: Path) -> None:
    """Read through a map, the process would end by SIGBUS."""
    folder = shutil.copytree(plain, tmp_path / "model")
    held = Tensors(Files(folder))
    path, _ = convert(plain, tmp_path / "a.gguf", Kind.F32)
    opened = open_gguf(path)
    assert opened.read(min(opened.tensors.values(), key=lambda tensor: tensor.begin)).size
    for file in (folder / "model.safetensors", path):
        os.truncate(file, 9000)
    last = max(opened.tensors.values(), key=lambda tensor: tensor.begin)
    with pytest.raises(ModelError, match="has changed since its header was read; load it again"):
        list(map(held.raw, held.entries))
    with pytest.raises(ModelError, match="has changed since its header was read; load it again"):
        opened.read(last)


@pytest.mark.parametrize(
    ("fill", "sentence"),
    [
        (changed(block_count=10**7), "block_count is 10000000; a whole number from 1 to"),
        (changed(context_length=2**32 - 1), "context_length is 4294967295; a whole number"),
        (changed(rope_freq_base=float("nan")), "freq_base is nan; a finite number above 0"),
        (lambda w: w.add_string("general.alignment", "x"), "general.alignment is 'x'; a whole"),
        (lambda w: w.add_string("split.count", "x"), "split.count is 'x'; a whole number"),
        (lambda w: w.add_string("llama.embedding_length", "x"), "embedding_length is 'x'; a whole"),
        (lambda w: w.add_uint32("tokenizer.chat_template", 3), "chat_template is 3; a text"),
        (lambda w: w.add_array("tokenizer.ggml.tokens", [1, 2]), "ggml.tokens is damaged"),
    ],
)
def test_metadata_of_gguf_are_typed(
    fill: Callable[[gguf.GGUFWriter], object], sentence: str, tmp_path: Path, plain: Path
) -> None:
    def override(writer: gguf.GGUFWriter) -> None:
        fresh = gguf.GGUFWriter(None, "llama")
        if "chat_template" in sentence:
            fresh.add_tokenizer_model("gpt2")
            fresh.add_tokenizer_pre("gpt-2")
            fresh.add_token_list(["a", "b", "ab"])
            fresh.add_token_merges(["a b"])
        elif "tokens" in sentence:
            fresh.add_tokenizer_model("llama")
            fresh.add_vocab_size(320)
        fill(fresh)
        fresh.kv_data[0].pop("general.architecture", None)
        writer.kv_data[0] = {**writer.kv_data[0], **fresh.kv_data[0]}

    path, _ = convert(plain, tmp_path / "a.gguf", Kind.F32, override)
    with pytest.raises(ModelError, match=sentence) as error:
        LLM(path, drafter=None, memory="16MiB")
    assert "\n" not in str(error.value)


def test_tensors_of_gguf_do_not_overlap(plain: Path, tmp_path: Path) -> None:
    """A small file whose tensors are all the same bytes would take memory for each."""
    path = tmp_path / "a.gguf"
    tensor = b"".join(
        struct.pack("<Q", 2) + f"{i:02}".encode() + struct.pack("<IQIQ", 1, 1000, 0, 0)
        for i in range(50)
    )
    header = b"GGUF" + struct.pack("<IQQ", 3, 50, 0) + tensor
    path.write_bytes(header + bytes(-len(header) % 32 + 4000))
    with pytest.raises(ModelError, match="tensors overlap"):
        open_gguf(path)


def test_a_long_piece_costs_its_length(tmp_path: Path) -> None:
    """Every cut of a token of 320,000 characters took 9 seconds."""

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<unk>", "a", "b", "ab", "ab" * 160_000])
        writer.add_token_scores([0.0, -1.0, -2.0, -3.0, -4.0])
        writer.add_token_types([2, 1, 1, 1, 1])
        writer.add_unk_token_id(0)
        writer.add_bool("tokenizer.ggml.add_space_prefix", False)

    path = empty(tmp_path / "a.gguf", fill)
    started = time.process_time()
    found = gguf_tokenizer(open_gguf(path))
    assert time.process_time() - started < 3
    assert found is not None
    assert found.backend.encode("ab", add_special_tokens=False).ids == [3]


def test_expressions_take_time_by_the_name() -> None:
    started = time.process_time()
    assert not matches(r"re:^(.|\w)+!$", "model.layers.0.self_attn.q_proj" * 8)
    assert not matches("re:" + "(a+)+" * 20 + "!", "a" * 200)
    assert time.process_time() - started < 5
    assert matches(r"re:.*self_attn.*", "model.layers.0.self_attn.q_proj")
    assert matches(r"re:model\.layers\.\d+\.mlp", "model.layers.10.mlp.up_proj")
    assert matches(r"re:^.*_proj$", "model.layers.10.mlp.up_proj")
    assert not matches(r"re:.*mlp$", "model.layers.10.mlp.up_proj")
    assert matches("lm_head", "lm_head")
    assert not matches("Linear", "lm_head")
    for target in (r"re:(?=a)b", "re:(", "re:" + "a" * 2000, 3):
        with pytest.raises(ModelError, match="targets"):
            patterns(Fields({"targets": [target]}, "x"), "targets")


def test_scales_take_the_room_of_their_matrix() -> None:
    class Source:
        folder = Path("x")

        def raw(self, name: str) -> NDArray[np.float32]:
            return np.ones((1, 2), np.float32)

    scales, group = read_scales(Source(), "s", (64, 32), (), (10**9, 16))  # type: ignore[arg-type]
    assert scales.shape == (64, 2)
    assert scales.base is None or scales.base.nbytes < 10_000
    assert group == 16


def test_a_fallback_is_as_large_as_its_files(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path, "gpt2", n_embd=32, n_head=4, n_layer=2)
    known = json.loads((folder / "config.json").read_text())
    for values in ({"n_inner": 10**8}, {"n_positions": 10**6}, {"vocab_size": 2**30}):
        (folder / "config.json").write_text(json.dumps({**known, **values}))
        with pytest.raises(ModelError, match="but the files hold"):
            load_model(open_checkpoint(folder), "float32", CPU, 64)


def test_masks_of_a_fallback_are_no_parameters(tmp_path: Path) -> None:
    """A long context makes GPT-Neo's masks larger than the little model, within reason."""
    neo = {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
    folder = build_checkpoint(tmp_path, "gpt_neo", **neo, max_position_embeddings=8192)
    load_model(open_checkpoint(folder), "float32", CPU, 64)
    known = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**known, "max_position_embeddings": 40_000}))
    with pytest.raises(ModelError, match=r"[0-9]+ bytes of tables, but the files hold"):
        load_model(open_checkpoint(folder), "float32", CPU, 64)


@pytest.mark.parametrize(("window", "found"), [(0, None), (None, None), (9, 9)])
def test_a_window_of_zero_is_none(window: int | None, found: int | None, edited: Edit) -> None:
    folder = edited(model_type="mistral", sliding_window=window)
    architecture = open_checkpoint(folder).architecture
    assert architecture is not None
    assert set(architecture.windows) == {found}


def test_lists_that_are_not_of_layers_are_not_read(tmp_path: Path) -> None:
    source = build_checkpoint(tmp_path / "source", "llama", num_hidden_layers=3)

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_array("llama.rope.dimension_sections", [1, 2, 3, 4])

    path, _ = convert(source, tmp_path / "a.gguf", Kind.F32, fill)
    assert open_checkpoint(path).config.num_hidden_layers == 3


def test_tables_made_in_parts_are_the_whole(plain: Path) -> None:
    """The same bits as one product over all positions."""
    config, length = open_checkpoint(plain).config, 2 * PART + 77
    made = Rope(config, length)
    angles = np.arange(length, dtype=np.float32)[:, None] * made._short[None, :]
    whole = made._tables(angles)
    cos, sin = made.halves()
    assert np.array_equal(cos, whole[:, 0, 4:])
    assert np.array_equal(sin, whole[:, 1, 4:])
    assert np.array_equal(made.table(), whole)


def test_a_tokenizer_of_python_is_refused(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow:
        pass

    shutil.copyfile(plain / "tokenizer_config.json", tmp_path / "tokenizer_config.json")
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: Slow())
    with pytest.raises(ModelError, match=r"written in Python and has no tokenizer.json"):
        read_codec(tmp_path)


def test_a_panic_of_the_tokenizer_is_a_sentence(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        pass

    def panic(*_: Any, **__: Any) -> Tokenizer:
        raise Panic("called `Option::unwrap()` on a `None` value")

    monkeypatch.setattr("outrider.checkpoints.folder_tokenizer.Tokenizer", Mock(from_file=panic))
    with pytest.raises(ModelError, match=r"cannot be read \(called `Option::unwrap"):
        read_codec(plain)


def test_what_is_read_is_what_was_stored(plain: Path) -> None:
    from safetensors.torch import load_file

    checkpoint = Tensors(Files(plain))
    for name, tensor in load_file(plain / "model.safetensors").items():
        assert torch.equal(as_tensor(checkpoint.raw(name)), tensor)
    architecture = open_checkpoint(plain).architecture
    assert architecture is not None
    llm = LLM(plain, drafter=None)
    assert llm.generate([[1, 2]], SamplingParams(max_tokens=2))[0].outputs[0].token_ids
    assert np.isfinite(architecture.scale)


@pytest.fixture
def limited() -> Iterator[None]:
    """A limit of seconds: to open a pipe that nobody writes to waits for ever."""
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits"))
    signal.alarm(30)
    yield
    signal.alarm(0)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = Path.cwd()
        os.chdir(path.parent)  # names of sockets are short
        made.bind(path.name)
        os.chdir(here)


FILES = ("config.json", "model.safetensors", "tokenizer.json", "model.safetensors.index.json",
         "generation_config.json", "tokenizer_config.json")  # fmt: skip


@pytest.mark.parametrize("put", [pipe, device, listening, Path.mkdir])
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_is_not_waited_for(
    edited: Edit, put: Callable[[Path], object], name: str, limited: None
) -> None:
    """It is refused, or the checkpoint is read as if there were none."""
    folder = edited()
    (folder / name).unlink(missing_ok=True)
    put(folder / name)
    with suppress(ModelError):
        load_model(open_checkpoint(folder), "float32", CPU, 64)
        read_codec(folder)
    if name == "model.safetensors":
        with pytest.raises(
            ModelError, match=r"model\.safetensors (is not a regular file|has no|is dam)"
        ):
            load_model(open_checkpoint(folder), "float32", CPU, 64)


@pytest.mark.parametrize("put", [pipe, device, listening])
def test_a_gguf_that_is_no_file_is_refused(
    tmp_path: Path, put: Callable[[Path], object], limited: None
) -> None:
    put(tmp_path / "model.gguf")
    with pytest.raises(ModelError, match=r"model\.gguf is not a regular file"):
        load_model(open_checkpoint(tmp_path / "model.gguf"), "float32", CPU, 64)


@pytest.mark.parametrize("put", [pipe, device, listening, Path.mkdir])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_convert_waits_for_no_pipe(
    edited: Edit, tmp_path: Path, put: Callable[[Path], object], name: str, limited: None
) -> None:
    folder = edited()
    (folder / "model.safetensors").unlink()
    put(folder / name)
    with pytest.raises(ModelError):
        converted(folder, tmp_path / "new")
