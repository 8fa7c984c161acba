"""Writes a head in a layout that other engines and libraries read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from .checkpoint import Checkpoint
from .dtypes import BFLOAT16, FLOAT32, Array, cast
from .extras import KEY
from .files import new_folder, save_file
from .head_tensors import QUANTIZATION, HeadTensors, check_tensors, drafted_ids
from .heads import BORROWS, EAGLE3, LABELS, MEDUSA, PEAGLE, TRAINED, Head, check_target
from .matrices import plain
from .weights import Loader

SPECULATORS, SAFEAILAB = LAYOUTS = ("speculators", "safeailab")
VERSION = "0.9.0"
"""The version of the ``speculators`` library whose layout is written."""
SPECULATOR_CLASSES = {EAGLE3: "Eagle3Speculator", PEAGLE: "PEagleSpeculator"}
EMBEDDING = "embed_tokens.weight"
MEDUSA_DEFAULTS = {"model_type": "medusa", "architectures": ["MedusaModel"]}
"""Entries by which vLLM recognises Medusa heads."""
FLAGS = ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm")
COPIED = ("tokenizer*", "special_tokens_map.json", "README.md")


def export_head(
    head: Head, out: Path, layout: str, target: Checkpoint | None, name: str | None
) -> int:
    """Write a head to the new folder ``out``, and return the number of its tensors.

    In the ``speculators`` layout it has an embedding, the ``target``'s if it has none of its own:
    the library leaves a missing one unset. ``name`` replaces the target's name; None keeps it.
    """
    if layout not in LAYOUTS:
        raise ConfigError(f"layout is {layout!r}; give {' or '.join(LAYOUTS)}.")
    check_tensors(head)
    name = name or head.verifier
    config, tensors = _medusa(head, name) if head.kind == MEDUSA else _eagle(head, layout, name)
    if needs_target(head, layout):
        tensors |= _of_target(head, target)
    if KEY in (head.files.config or {}):
        config[KEY] = head.extras.to_json()
    with new_folder(out) as new:
        for pattern in COPIED:
            for file in head.folder.glob(pattern):
                if file.is_file():  # not a pipe, which may never end
                    shutil.copyfile(file, new / file.name)
        save_file(tensors, new / "model.safetensors", {"format": "pt"})
        (new / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return len(tensors)


def needs_target(head: Head, layout: str) -> bool:
    """Return whether a layout needs a matrix of the target's that the head lacks."""
    if head.kind == MEDUSA:
        return head.borrows_output
    return layout == SPECULATORS and EMBEDDING not in HeadTensors(head.files)


def _of_target(head: Head, target: Checkpoint | None) -> dict[str, Array]:
    """Return the target's embedding, or its output matrix for each of Medusa's heads."""
    if target is None or target.architecture is None:
        what = "output matrix" if head.kind == MEDUSA else "embedding"
        raise ConfigError(
            f"{head.folder} has no {what}, which this layout needs; give the target that "
            "it was made for (--target), a model of a native family."
        )
    a = target.architecture
    check_target(head, a, a.hidden_size, a.num_layers)
    loader = Loader(target.tensors, a, FLOAT32, False)
    table = loader.table()
    if head.kind != MEDUSA:
        return {EMBEDDING: cast(plain(table, FLOAT32), BFLOAT16)}
    output = cast(plain(loader.head(table), FLOAT32), BFLOAT16)
    return {f"{place}.{head.blocks}.weight": output for place in range(head.longest or 1)}


def _medusa(head: Head, name: str | None) -> tuple[dict[str, Any], dict[str, Array]]:
    source = HeadTensors(head.files)
    tensors = {each: source.whole(each) for each in source.stems}
    biased = any(each.endswith(".bias") for each in tensors)
    config = {**written_whole(head), **medusa_config(head, biased)}
    config.pop(BORROWS, None)
    return config | ({"base_model_name_or_path": name} if name else {}), tensors


def medusa_config(head: Head, biased: bool) -> dict[str, Any]:
    """Return what vLLM reads of Medusa heads; without ``medusa_fc_bias`` it drops biases."""
    return MEDUSA_DEFAULTS | {
        "medusa_num_heads": head.longest, "medusa_num_layers": head.blocks,
        "hidden_size": head.hidden_size, "vocab_size": head.vocab_size, "medusa_fc_bias": biased,
    }  # fmt: skip


def _eagle(head: Head, layout: str, name: str | None) -> tuple[dict[str, Any], dict[str, Array]]:
    if head.kind not in TRAINED:
        raise ConfigError(
            f"{head.folder} is a head of {LABELS[head.kind]}, which has no other layout; engines "
            "read it as it is."
        )
    if head.kind != EAGLE3 and layout == SAFEAILAB:
        raise ConfigError(
            f"{head.folder} is a head of kind {head.kind}, which SafeAILab's code does not know; "
            f"export it as {SPECULATORS}."
        )
    source, a = HeadTensors(head.files), head.architecture
    assert a is not None
    ids = drafted_ids(source, head)
    tensors = {plain_name(each): source.whole(each) for each in source.stems}
    if ids is None or ids == [*range(head.vocab_size)]:
        tensors = {each: x for each, x in tensors.items() if each not in ("d2t", "t2d")}
    elif "t2d" not in tensors:
        tensors |= mapping(np.array(ids), head.vocab_size)
    options = written_whole(head)
    layer = {**(options.get("transformer_layer_config") or _layer(options))}
    layer |= {"vocab_size": head.vocab_size, "head_dim": a.head_dim, "tie_word_embeddings": False}
    if layout == SAFEAILAB:
        return safeailab(head, layer, tensors)
    return speculators(head, layer, name), tensors


def _layer(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a head's layer from a config that mixes them with the head's."""
    others = ("draft_vocab_size", "eagle_config", "eagle_aux_hidden_state_layer_ids", KEY, *FLAGS)
    kept = {name: value for name, value in options.items() if name not in others}
    return {"model_type": "llama", **kept, "architectures": ["LlamaForCausalLM"]}


def speculators(head: Head, layer: dict[str, Any], name: str | None) -> dict[str, Any]:
    """Return the config of a head whose layers have the options ``layer``."""
    options = written_whole(head)
    if "speculators_model_type" in options:
        about = options.get("speculators_config") or {}
        verifier = {**(about.get("verifier") or {})} | ({"name_or_path": name} if name else {})
        return {**options, "speculators_config": {**about, "verifier": verifier}}
    assert head.architecture is not None
    layers = {} if head.layers is None else _entered(head.layers)
    return speculators_config(name, [], head.proposed or 4) | {
        "transformer_layer_config": layer, "draft_vocab_size": head.architecture.vocab_size,
        "norm_before_residual": head.state_normed, "norm_output": head.output_normed,
        "norm_before_fc": head.fused_norms == ("input_norm.weight",),
        "fc_norm": head.fused_norms not in ((), ("input_norm.weight",)),
        "embed_requires_grad": False, "target_hidden_size": None, **layers,
        "tie_word_embeddings": False,
    }  # fmt: skip


def speculators_config(
    verifier: str | None, architectures: list[str], length: int, kind: str = EAGLE3
) -> dict[str, Any]:
    """Return the ``speculators`` config for using a head of a kind."""
    method = {
        "proposal_type": "greedy", "speculative_tokens": length, "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }  # fmt: skip
    return {
        "architectures": [SPECULATOR_CLASSES[kind]], "speculators_model_type": kind,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": kind, "default_proposal_method": "greedy", "proposal_methods": [method],
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        },
    }  # fmt: skip


def safeailab(
    head: Head, layer: dict[str, Any], tensors: dict[str, Array]
) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return config and tensors in SafeAILab's layout.

    Raises ConfigError: its code would misread the head.
    """
    a, options = head.architecture, head.files.config or {}
    assert a is not None
    flags = [name for name in FLAGS if options.get(name)]
    if flags or a.num_layers > 1:
        what = " and ".join(flags) or f"{a.num_layers} layers"
        raise ConfigError(
            f"{head.folder} has {what}, which SafeAILab's code does not know; export it as "
            f"{SPECULATORS}, or train one with outrider train eagle3 --layout {SAFEAILAB}."
        )
    inside = {name: value for name, value in layer.items() if name != "architectures"}
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], **inside, "draft_vocab_size": a.vocab_size,
    }  # fmt: skip
    if head.layers is not None:
        config |= _entered(head.layers)
        config["eagle_config"] = {
            "use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [*head.layers],
        }  # fmt: skip
    named = {name.replace("layers.0.", "midlayer.", 1): x for name, x in tensors.items()}
    return config, named


def _entered(layers: tuple[int, ...]) -> dict[str, list[int]]:
    """Return the layers whose outputs are taken, by vLLM's numbers: those that they enter."""
    return {"eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in layers]}


def mapping(ids: NDArray[np.int64], vocab_size: int) -> dict[str, Array]:
    """Return the tensors that say which ids are drafted."""
    known = np.zeros(vocab_size, np.bool_)
    known[ids] = True
    return {"d2t": ids - np.arange(len(ids)), "t2d": known}


def written_whole(head: Head) -> dict[str, Any]:
    """Return the config of a head without its description of quantised matrices."""
    return {name: x for name, x in (head.files.config or {}).items() if name != QUANTIZATION}


def plain_name(stored: str) -> str:
    """Return a tensor's name in ``speculators``' layout; SafeAILab's layer is the midlayer."""
    return stored.removeprefix("model.").replace("midlayer.", "layers.0.", 1)
