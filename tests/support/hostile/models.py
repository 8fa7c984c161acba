"""Readers of checkpoints' files, of tiny models made on the spot; see ``hostile_readers``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from outrider.errors import OutriderError
from tests.support.hostile.families import FAMILIES, IN_FILES
from tests.support.hostile.inputs import damaged, jsons, trees
from tests.support.hostile.readers import Made, check_said, reader
from tests.support.tiny import build_checkpoint


@cache
def checkpoint(root: Path) -> Path:
    """A tiny checkpoint with a tokenizer."""
    return build_checkpoint(root / "llama", "llama", tokenizer=True, hidden_size=64)


def with_file(folder: Path, name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """A call that reads the checkpoint with another file in it."""
    shutil.copytree(checkpoint(folder.parent), folder)

    def call(data: bytes) -> object:
        (folder / name).write_bytes(data)
        return read(folder)

    return call


def sample_of(folder: Path, name: str) -> Any:
    return json.loads((checkpoint(folder.parent) / name).read_text())


def shaped(model: Path) -> None:
    """Read a checkpoint's config and make its rotary tables, as a load does."""
    from outrider.checkpoints.checkpoint import open_checkpoint
    from outrider.checkpoints.rope import STILL, Rope

    checkpoint = open_checkpoint(model)
    known = checkpoint.architecture
    if known is not None and known.head_dim < 1 << 16:  # a load refuses larger tables
        for kind in {*known.kinds} - {STILL}:
            Rope(checkpoint.config, 64, kind).halves()


@reader("model: config.json of each family")
def families(folder: Path) -> Made:
    sample = sample_of(folder, "config.json")
    samples = [{**sample, "model_type": name, **more} for name, more in FAMILIES.items()]
    wrapped = {"model_type": "gemma3", "text_config": samples[list(FAMILIES).index("gemma3_text")]}
    return jsons(*samples, wrapped), with_file(folder, "config.json", shaped)


@reader("model: config.json")
def config(folder: Path) -> Made:
    sample = sample_of(folder, "config.json")
    scaled = {
        **sample, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "sliding_window": 24, "use_sliding_window": True,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0},
        "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 16},
    }  # fmt: skip
    return jsons(sample, scaled), with_file(folder, "config.json", shaped)


@reader("model: generation_config.json")
def generation_config(folder: Path) -> Made:
    from outrider.server.build import read_defaults

    sample = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "eos_token_id": [0, 1],
              "max_new_tokens": 64, "repetition_penalty": 1.1, "do_sample": True}  # fmt: skip

    def read(at: Path) -> None:
        shaped(at)
        read_defaults("auto", at)

    return jsons(sample), with_file(folder, "generation_config.json", read)


def tokenized(folder: Path) -> None:
    """Read a checkpoint's tokenizer, and use it."""
    from outrider.checkpoints.tokenizers import read_codec

    codec = read_codec(folder)
    codec.backend.decode(codec.encode("def greet(name):\n    return 1"))
    codec.chat([{"role": "user", "content": "hello"}])


@reader("model: tokenizer.json")
def tokenizer(folder: Path) -> Made:
    sample = sample_of(folder, "tokenizer.json")
    sample["normalizer"] = {"type": "Sequence", "normalizers": [
        {"type": "Replace", "pattern": {"Regex": "(a+)+b"}, "content": "x"},
        {"type": "NFC"},
    ]}  # fmt: skip
    return jsons(sample), with_file(folder, "tokenizer.json", tokenized)


@reader("model: tokenizer_config.json")
def tokenizer_config(folder: Path) -> Made:
    sample = sample_of(folder, "tokenizer_config.json")
    sample["chat_template"] = "{% for m in messages %}{{ m.content }}{% endfor %}"
    sample["added_tokens_decoder"] = {"0": {"content": "<|end|>", "special": True}}
    return jsons(sample), with_file(folder, "tokenizer_config.json", tokenized)


def headed(header: bytes, tail: bytes, length: int | None) -> bytes:
    """A safetensors file of a header, whose length may be another."""
    return (len(header) if length is None else length).to_bytes(8, "little") + header + tail


@reader("model: safetensors header")
def safetensors(folder: Path) -> Made:
    from outrider.checkpoints.files import Files

    whole = (checkpoint(folder.parent) / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    sample = json.loads(whole[8:end])
    few = {name: sample[name] for name in list(sample)[:6]}
    lengths = st.one_of(*[st.none()] * 5, st.integers(0, 2**64 - 1))
    headers = st.one_of(jsons(few), jsons(sample))
    cases = st.one_of(
        st.builds(partial(headed, tail=whole[end:]), headers, length=lengths),
        damaged(whole[: end + 64]),
    )

    def read(at: Path) -> None:
        for entry in Files(at).tensors.values():
            entry.read()

    return cases, with_file(folder, "model.safetensors", read)


@reader("model: safetensors index")
def index(folder: Path) -> Made:
    from outrider.checkpoints.files import Files

    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(4)]
    sample = {
        "metadata": {"total_size": 9},
        "weight_map": dict.fromkeys(names, "model.safetensors"),
    }

    def read(at: Path) -> object:
        return Files(at).tensors

    return jsons(sample), with_file(folder, "model.safetensors.index.json", read)


@reader("model: GGUF")
def gguf(folder: Path) -> Made:
    from gguf import GGMLQuantizationType as Kind

    from outrider.checkpoints.formats.gguf import open_gguf
    from outrider.checkpoints.formats.gguf_config import gguf_config
    from outrider.checkpoints.formats.gguf_tokenizer import gguf_tokenizer
    from tests.support.ggufs import add_pieces, byte_level, convert, pieces
    from tests.support.mutations import POOL

    source = checkpoint(folder.parent)
    folder.mkdir(parents=True)
    path, _ = convert(source, folder / "a.gguf", Kind.F32, byte_level())

    def fill(writer: Any) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        add_pieces(writer, pieces()[1])

    other, _ = convert(source, folder / "b.gguf", Kind.F32, fill)
    wholes = [path.read_bytes(), other.read_bytes()]
    numbers = [number for number in POOL if type(number) is int]

    def spoiled(whole: bytes, steps: list[tuple[int, int, int]]) -> bytes:
        data = bytearray(whole)
        for at, size, number in steps:
            data[at : at + size] = (number % (1 << (8 * size))).to_bytes(size, "little")
        return bytes(data)

    step = st.tuples(
        st.one_of(st.integers(0, 400), st.integers(0, 16_000)),
        st.sampled_from([1, 1, 4, 8]),
        st.one_of(st.sampled_from(numbers), st.integers(0, 2**64)),
    )
    steps = st.lists(step, max_size=3)
    cases = st.one_of(
        st.builds(spoiled, st.sampled_from(wholes), steps),
        damaged(*(whole[:20_000] for whole in wholes)),
    )

    def call(data: bytes) -> None:
        path.write_bytes(data)
        file = open_gguf(path)
        gguf_config(file)
        gguf_tokenizer(file)

    return cases, call


@reader("model: GGUF metadata")
def metadata(folder: Path) -> Made:
    from gguf import GGMLQuantizationType as Kind

    from outrider.checkpoints.formats.gguf import open_gguf
    from outrider.checkpoints.formats.gguf_tokenizer import gguf_tokenizer
    from tests.support.ggufs import byte_level, convert
    from tests.support.rewritten import Rewritten

    folder.mkdir(parents=True)
    files = []
    for name in IN_FILES:
        source = build_checkpoint(folder / name, name, tokenizer=True, **FAMILIES[name])
        files.append(Rewritten(convert(source, folder / f"{name}.gguf", Kind.F32, byte_level())[0]))
    path = folder / "changed.gguf"

    def call(case: tuple[int, Any]) -> None:
        number, changed = case
        path.write_bytes(files[number].with_metadata(changed if isinstance(changed, dict) else {}))
        gguf_tokenizer(open_gguf(path))
        shaped(path)

    cases = [st.tuples(st.just(i), trees(file.metadata)) for i, file in enumerate(files)]
    return st.one_of(*cases), call


@reader("drafter: head config")
def heads(folder: Path) -> Made:
    from transformers import AutoConfig

    from outrider.checkpoints.head_tensors import check_tensors
    from outrider.checkpoints.heads import read_head
    from tests.support.heads import Eagle, make_head, make_medusa, save_head

    target = AutoConfig.from_pretrained(checkpoint(folder.parent))
    head = make_head(Eagle(drafted=97), target)
    places = [
        save_head(head, folder / "eagle"),
        save_head(head, folder / "safeailab", "safeailab", embeds=False),
        folder / "medusa",
    ]
    make_medusa(folder / "medusa", target.hidden_size, target.vocab_size)
    samples = [json.loads((place / "config.json").read_text()) for place in places]
    samples[-1]["medusa_choices"] = [[0], [1], [0, 0]]

    def call(case: tuple[int, bytes]) -> None:
        place = places[case[0]]
        (place / "config.json").write_bytes(case[1])
        found = read_head(place)
        if found is not None:
            check_tensors(found)

    cases = [st.tuples(st.just(i), jsons(sample)) for i, sample in enumerate(samples)]
    return st.one_of(*cases), call


@reader("drafter: check")
def pairs(folder: Path) -> Made:
    from outrider.drafters.check import check, check_retokenized

    target = checkpoint(folder.parent)
    names = ("config.json", "tokenizer.json", "tokenizer_config.json")
    wholes = {name: (target / name).read_bytes() for name in names}
    samples = {name: json.loads(whole) for name, whole in wholes.items()}
    shutil.copytree(target, folder)

    def call(case: tuple[str, bytes]) -> None:
        name, data = case
        (folder / name).write_bytes(data)
        try:
            for compare in (check, partial(check_retokenized, texts=["def greet(name):\n"])):
                try:
                    _, facts = compare(folder, target)
                except OutriderError as error:
                    check_said(str(error))
                else:
                    for fact in facts:
                        check_said(f"{fact.what} {fact.drafter} {fact.target}")
        finally:
            (folder / name).write_bytes(wholes[name])

    return st.one_of(*[st.tuples(st.just(name), jsons(samples[name])) for name in names]), call


@reader("deploy: facts of a folder")
def facts(folder: Path) -> Made:
    from outrider.ops.deploy.render import render
    from outrider.ops.deploy.spec import filled, parse

    sample = sample_of(folder, "config.json")

    def read(at: Path) -> None:
        render(filled(parse({"engine": "vllm", "target": {"model": str(at)}})))

    return jsons({**sample, "text_config": dict(sample)}), with_file(folder, "config.json", read)


@reader("quantisation of a config")
def quantisation(folder: Path) -> Made:
    from outrider.checkpoints.checkpoint import find_format

    packed = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear", "re:.*proj"], "weights": {
            "num_bits": 4, "type": "int", "strategy": "group", "group_size": 16,
            "symmetric": False}}},
    }  # fmt: skip
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": True,
            "modules_in_block_to_quantize": [["a"]], "dynamic": {}}  # fmt: skip
    awq = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True,
           "version": "gemm",
           "modules_to_not_convert": ["x"]}  # fmt: skip
    fp8 = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
    folder.mkdir(parents=True)

    def call(options: Any) -> None:
        if isinstance(options, dict):  # config.json's own check sees to that
            find_format(options, folder)

    return trees(packed, gptq, awq, fp8), call
