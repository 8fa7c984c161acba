"""Models that transformers runs: its logits, the same bits however the work is cut up, or plainly.

Sizes are those of conftest; contexts of 72 tokens are longer than the windows and than what the
scaled ropes were trained on.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from outrider import LLM, SamplingParams
from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.errors import ConfigError, ModelError
from outrider.models.fallback import Fallback, SequenceStore
from outrider.models.load import load_model
from outrider.models.rows import Segment
from outrider.models.tiles import TILE
from outrider.sampling.pipeline import Logits

CPU = "cpu"
LENGTH = 72
MakeCheckpoint = Callable[..., Path]

GPT2 = {"n_embd": 32, "n_head": 4, "n_layer": 2}
WINDOWS = {"sliding_window": 24, "layer_types": ["full_attention", "sliding_attention"]}
SCALED = {"max_position_embeddings": 48, "rope_parameters": {
    "rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}  # fmt: skip
LONGROPE = {
    "num_local_experts": 4, "num_experts_per_tok": 2, "original_max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4,
                        "long_factor": [2.0, 3.0, 4.0, 5.0], "short_mscale": 1.0,
                        "long_mscale": 1.2, "original_max_position_embeddings": 64},
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", GPT2),
    "gpt_neo": ("gpt_neo", {"num_layers": 2, "num_heads": 4, "window_size": 24,
                            "attention_types": [[["global", "local"], 1]]}),
    "gpt_neox": ("gpt_neox", {}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "bloom": ("bloom", {"n_head": 4, "n_layer": 2}),  # alibi
    "falcon": ("falcon", {}),
    "phi": ("phi", {}),
    "olmo": ("olmo", {}),
    "starcoder2": ("starcoder2", {"sliding_window": 24}),
    "cohere2": ("cohere2", WINDOWS),
    "qwen2_moe": ("qwen2_moe", {"num_experts": 4, "num_experts_per_tok": 2,
                                "moe_intermediate_size": 32,
                                "shared_expert_intermediate_size": 32}),
    "phimoe-longrope": ("phimoe", LONGROPE),
    "olmo-dynamic": ("olmo", SCALED),
    "no cache": ("openai-gpt", GPT2),
}  # fmt: skip
PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("mamba", {"state_size": 4}),
    "mamba2": ("mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 4, "n_groups": 1}),
    "rwkv": ("rwkv", {"attention_hidden_size": 32}),
    "jamba": ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2,
                        "mamba_d_state": 4, "use_mamba_kernels": False}),
    # Keeps a part of its state in itself.
    "recurrent_gemma": ("recurrent_gemma", {"lru_width": 32, "attention_window_size": 24,
                                            "block_types": ["recurrent", "attention"]}),
}  # fmt: skip


def ids_of(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(128) for _ in range(length)]


def whole(tokens: Sequence[int], start: int = 0, key: str = "a", prompt: int = LENGTH) -> Segment:
    return Segment(tokens, start, (), len(tokens), prompt, key=key)


def logits(model: Fallback, store: SequenceStore, *segments: Segment) -> Logits:
    found = model.run(segments, store).logits
    assert found is not None
    assert found.dtype == np.float32
    return found


def load(folder: Path, dtype: str = "float32") -> Fallback:
    model = load_model(open_checkpoint(folder), dtype, CPU, 256)
    assert isinstance(model, Fallback)
    assert not model.trees
    return model


@pytest.fixture(scope="module")
def checkpoints(
    make_checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            family, config = {**CASES, **PLAIN}[name]
            made[name] = make_checkpoint(tmp_path_factory.mktemp("m"), family, **config)
        return made[name]

    return get


@torch.inference_mode()
def theirs(folder: Path, ids: Sequence[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return found


def in_chunks(model: Fallback, ids: list[int], size: int, prompt: int = LENGTH) -> Logits:
    """``ids`` in chunks, another sequence coming between."""
    store, found = model.new_store(2, 16), []
    for start in range(0, len(ids), size):
        part = ids[start : start + size]
        half = [t // 2 for t in part]
        one, other = (whole(p, start, key, prompt) for p, key in ((part, "a"), (half, "b")))
        found.append(logits(model, store, one, other)[: len(part)])
    return np.concatenate(found)


@pytest.mark.parametrize("name", [*CASES, *PLAIN])
def test_logits_are_transformers(name: str, checkpoints: Callable[[str], Path]) -> None:
    ids = ids_of(LENGTH)
    found = in_chunks(load(checkpoints(name)), ids, LENGTH)
    expected = theirs(checkpoints(name), ids)
    assert expected.std() > 0.1
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", [*CASES, *PLAIN])
def test_rows_do_not_depend_on_how_the_work_is_cut_up(
    name: str, checkpoints: Callable[[str], Path]
) -> None:
    # Models without a cache that can be cut go token by token.
    model, ids = load(checkpoints(name)), ids_of(LENGTH if name in CASES else 30)
    for prompt, sizes in ((len(ids), (16, len(ids) - 1)), (9, (5, len(ids) - 1))):
        expected = in_chunks(model, ids, len(ids), prompt)
        for size in sizes:
            assert np.array_equal(in_chunks(model, ids, size, prompt), expected), (prompt, size)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_drafts_leave_no_trace(name: str, dtype: str, checkpoints: Callable[[str], Path]) -> None:
    """Chains of which some, all or none turn out right."""
    model, ids, draw = load(checkpoints(name), dtype), ids_of(LENGTH), random.Random(1)
    assert model.truncates
    expected = in_chunks(model, ids, LENGTH, 13)
    store = model.new_store(2, 16)
    found, at = [logits(model, store, whole(ids[:13], prompt=13))], 13
    while at < LENGTH:
        length = min(5, LENGTH - 1 - at)
        right = draw.randint(0, length)
        nodes = ids[at + 1 : at + 1 + right] + ids_of(length - right, at)
        chain = list(range(-1, length - 1))
        segment = Segment(ids[at : at + 1], at, (), 1 + length, 13, nodes, chain, "a")
        found.append(logits(model, store, segment)[: 1 + right])
        at += 1 + right
    assert np.array_equal(np.concatenate(found), expected)


@pytest.mark.parametrize("name", ["gpt2", "starcoder2", "cohere2", "no cache", "mamba", "rwkv"])
def test_greedy_ids_are_transformers(name: str, checkpoints: Callable[[str], Path]) -> None:
    prompts = [ids_of(5), ids_of(30, 1), ids_of(41, 2)]
    llm = LLM(checkpoints(name), drafter=None, dtype="float32", max_num_batched_tokens=20)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20))
    model = AutoModelForCausalLM.from_pretrained(checkpoints(name), dtype=torch.float32).eval()
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=20)
        assert output.outputs[0].token_ids == out[0, len(prompt) :].tolist()


def test_a_context_that_is_no_multiple_of_the_span_is_used_to_its_end(
    tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    folder = make_checkpoint(tmp_path, "gpt2", **{**GPT2, "max_position_embeddings": 21})
    llm = LLM(folder, drafter="ngram", dtype="float32")
    (output,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=None))
    assert len(output.outputs[0].token_ids) == 18


def test_rows_that_are_no_numbers_spoil_what_follows_them_only(
    tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    model, ids, poison = load(make_checkpoint(tmp_path, "olmo")), ids_of(20), 127
    assert poison not in ids
    expected = logits(model, model.new_store(2, 16), whole(ids))
    model._model.get_input_embeddings().weight.data[poison] = float("nan")
    store = model.new_store(2, 16)
    found = logits(model, store, whole([*ids[:10], poison, *ids[10:]]), whole(ids, key="b"))
    assert np.array_equal(found[:10], expected[:10])
    assert np.isnan(found[10:21]).all()
    assert np.array_equal(found[21:], expected)
    # A poisoned draft is thrown away, and leaves nothing behind.
    store = model.new_store(2, 16)
    draft = Segment(ids[:9], 0, (), 2, 9, [poison], [-1], "a")
    assert np.isnan(logits(model, store, draft)).all(-1).tolist() == [False, True]
    assert np.array_equal(logits(model, store, whole(ids[9:], 9)), expected[9:])


def test_trees_and_gaps_are_no_work_for_it(checkpoints: Callable[[str], Path]) -> None:
    model = load(checkpoints("gpt2"))
    store = model.new_store(2, 16)
    with pytest.raises(RuntimeError, match="chains only"):
        model.run([Segment([1], 0, (), 3, 1, [2, 3], [-1, -1], "a")], store)
    with pytest.raises(RuntimeError, match="draft chains only"):
        store.move([1], [2])
    with pytest.raises(RuntimeError, match="row 5 follows 0 rows"):
        model.run([whole([1], 5, "new")], store)
    plain = load(checkpoints("mamba"))
    store = plain.new_store(2, 16)
    plain.run([whole([1, 2, 3])], store)
    with pytest.raises(RuntimeError, match="row 2 follows 3 rows"):
        plain.run([whole([4], 2)], store)
    store.release("a")
    plain.run([whole([4], 0)], store)


def test_page_bytes_are_what_a_page_takes(checkpoints: Callable[[str], Path]) -> None:
    def taken(name: str, tokens: int) -> int:
        model = load(checkpoints(name))
        store = model.new_store(2, 16)
        model.run([whole(ids_of(tokens), prompt=tokens)], store)
        layers = store.kept["a"].cache.layers
        found = [v for layer in layers for v in vars(layer).values()]
        return sum(t.nbytes for t in found if isinstance(t, torch.Tensor))

    of_token, of_id = 2 * 2 * 32 * 4, 8  # keys and values of 2 layers, 32 fp32 wide
    gpt2 = load(checkpoints("gpt2"))
    assert gpt2.page_bytes(16) == 16 * (of_token + of_id)
    assert taken("gpt2", 16) == 16 * of_token
    # A window is kept at full length, so that it can go back.
    assert taken("starcoder2", 48) == 3 * taken("starcoder2", 16)
    # A state is as large for one token as for many.
    mamba = load(checkpoints("mamba"))
    assert mamba.page_bytes(32) - mamba.page_bytes(16) == 16 * of_id
    assert mamba.page_bytes(16) > 2 * 64 * 4 * 4  # 2 layers of 64 channels and 4 states, fp32


# What cannot go back is served plainly.


@pytest.mark.parametrize("name", PLAIN)
def test_what_cannot_go_back_is_served_plainly(
    name: str, checkpoints: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = checkpoints(name)
    params = SamplingParams(temperature=0.8, max_tokens=8, seed=5)
    prompts = [ids_of(9), ids_of(23, 1), ids_of(4, 2)]
    with caplog.at_level(logging.WARNING, "outrider"):
        llm = LLM(folder, dtype="float32", max_num_batched_tokens=7, max_num_seqs=2)
    (record,) = [each for each in caplog.records if each.name == "outrider"]
    sentence = f"{folder}: the state of a '{name}' model cannot go back to an earlier token"
    assert record.getMessage() == f"{sentence}, so it is decoded plainly, without a drafter."
    assert llm.drafter.name == llm.engine.drafter.name == "none"
    together = llm.generate(prompts, params)
    assert together[0].metrics.drafted == 0
    caplog.clear()
    alone = LLM(folder, drafter=None, dtype="float32")
    assert not caplog.records
    for prompt, output in zip(prompts, together, strict=True):
        (expected,) = alone.generate([prompt], params)
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids


def test_drafting_for_what_cannot_go_back_is_refused(
    checkpoints: Callable[[str], Path], tiny_llama: Path
) -> None:
    sentence = "'mamba' model cannot go back to an earlier token, so nothing can be drafted for it"
    for drafter in ("ngram", tiny_llama):
        with pytest.raises(ConfigError, match=sentence):
            LLM(checkpoints("mamba"), drafter=drafter)
    with pytest.raises(ModelError, match=r"earlier token, so it cannot draft; give another"):
        LLM(tiny_llama, drafter=checkpoints("mamba"))


def test_it_drafts_for_a_native_target(
    tiny_llama: Path, tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    drafter = make_checkpoint(tmp_path, "gpt2", vocab_size=320, tie_word_embeddings=False, **GPT2)
    params = SamplingParams(temperature=0.9, max_tokens=20, seed=1, ignore_eos=True)
    prompts = [ids_of(5), ids_of(12, 1)]
    plain = LLM(tiny_llama, drafter=None, dtype="float32").generate(prompts, params)
    llm = LLM(tiny_llama, drafter=drafter, num_speculative_tokens=4, dtype="float32")
    drafted = llm.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in drafted] == [o.outputs[0].token_ids for o in plain]
    assert llm.engine.counts.accepted > 0
    (store,) = (v for v in vars(llm.engine.drafter).values() if isinstance(v, SequenceStore))
    assert store.kept == {}


# No code and no pickles of a checkpoint's are ever run.


def add_code(folder: Path, marker: Path, **changes: Any) -> None:
    (folder / "code.py").write_text(f"open({str(marker)!r}, 'w')\nclass C: pass\n")
    file = folder / "config.json"
    auto = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.C"}
    config = {**json.loads(file.read_text()), "auto_map": auto, **changes}
    file.write_text(json.dumps(config))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_code_of_a_checkpoint_is_never_run(
    family: str, tmp_path: Path, make_checkpoint: MakeCheckpoint, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_checkpoint(tmp_path / "model", family, **(GPT2 if family == "gpt2" else {}))
    marker, params = tmp_path / "ran", SamplingParams(temperature=0, max_tokens=5)
    before = LLM(folder, drafter=None).generate([[1, 2, 3]], params)
    add_code(folder, marker)
    with caplog.at_level(logging.INFO, "outrider"):
        after = LLM(folder, drafter=None).generate([[1, 2, 3]], params)
    assert "its own code (auto_map) is ignored" in caplog.text
    assert before[0].outputs[0].token_ids == after[0].outputs[0].token_ids
    add_code(folder, marker, model_type="made-up")
    with pytest.raises(ModelError, match=r"needs Python code of its own .*which is never run"):
        LLM(folder)
    assert not marker.exists()


def test_damaged_and_pickled_weights_are_refused(
    tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    folder = make_checkpoint(tmp_path, "gpt2", **GPT2)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"model.safetensors is damaged"):
        load(folder)
    file.unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model.bin is a pickle.*outrider convert"):
        load(folder)


def test_a_missing_tensor_and_wrong_sizes_are_refused(
    tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    folder = make_checkpoint(tmp_path, "gpt2", **GPT2)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "n_layer": 3}))
    with pytest.raises(ModelError, match=r"no tensor 'transformer.h.2.*; its config.json promises"):
        load(folder)
    (folder / "config.json").write_text(json.dumps({**config, "n_embd": 40}))
    with pytest.raises(ModelError, match=r"transformers cannot load it: .*"):
        load(folder)


def test_a_model_that_reads_both_ways_is_found_out(
    checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def backwards(self: Any, kept: Any, *_: Any) -> tuple[torch.Tensor, None]:
        torch.manual_seed(sum(kept.tokens))
        return torch.randn(TILE, self.shape.vocab_size), None

    monkeypatch.setattr(Fallback, "_span", backwards)
    with pytest.raises(ModelError, match=r"lets rows depend on later ones; it cannot be decoded"):
        load(checkpoints("gpt2"))
