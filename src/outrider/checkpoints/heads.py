"""Reads checkpoints of heads: small drafters that continue from a target's hidden states.

Formats are those of EAGLE-1 and 2 (Li et al., 2024) by SafeAILab and vLLM, of EAGLE-3 (Li et al.,
2025) as SafeAILab and SpecForge write it, of DFlash (Chen et al., 2026) as z-lab writes it, of the
``speculators`` library (eagle3, peagle, dflash, dflash2 and dspark), and of Medusa (Cai et al.,
2024).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..base.fields import Fields
from ..base.limits import LARGEST_DRAFT, LARGEST_INT
from ..errors import ModelError, shown
from .architecture import Architecture, Shape
from .claims import check_claims
from .configs import PlainConfig, plain_config
from .extras import CHAT, NO_EXTRAS, Extras, read_extras
from .families import read_shape
from .files import Files, files_of

EAGLE1, EAGLE3, PEAGLE, MEDUSA = "eagle", "eagle3", "peagle", "medusa"
DFLASH, DFLASH2, DSPARK = "dflash", "dflash2", "dspark"
BLOCKS = DFLASH, DFLASH2, DSPARK
"""Heads that draft a block in one pass, whose rows see each other."""
LABELS = {
    EAGLE1: "EAGLE-1", EAGLE3: "EAGLE-3", PEAGLE: "P-EAGLE", MEDUSA: "Medusa", DFLASH: "DFlash",
    DFLASH2: "DFlash2", DSPARK: "DSpark",
}  # fmt: skip
TRAINED = EAGLE3, PEAGLE, MEDUSA
"""Heads that are trained here, and written in other layouts."""
FAMILIES = ("llama", "qwen2", "qwen3")
"""Families of the layers of heads."""
PARTS = 3
"""Default number of target layers whose outputs heads read."""
EAGLE1_NORMS = "enorm.weight", "hnorm.weight", "norm.weight", "layers.0.input_layernorm.weight"
"""Tensors that heads of EAGLE-1 lack."""
EAGLE1_TENSORS = "fc.weight", "layers.0."
"""Beginnings of the names of its tensors."""
MOST_HEADS, MOST_BLOCKS = 64, 16
MOST_RANK, MOST_TAPS = 4096, 8
MOST_CANDIDATES = 256
"""Likeliest ids that are scored; also for DSpark, whose bias of all ids would read a matrix."""
BORROWS = "original_lm_head"
"""vLLM's key by which Medusa heads use the target's output matrix."""
MOST_CHOICES, TOP_K = 256, 10
"""Most nodes of a Medusa tree, and draws after a node, the number that its authors use."""
Paths = tuple[tuple[int, ...], ...]
SAFEAILAB = "midlayer."
"""Beginning of the names of a layer's tensors, in SafeAILab's layout only."""


@dataclass(frozen=True)
class Block:
    """The block that a head drafts: ``size`` rows, the first of which has the last token.

    The first row drafts, too, if ``from_anchor``. Rows do not see later ones in layers with a
    window if ``causal_windows``, nor in others if ``causal``. A token is drawn by its logit and by
    a score of ``rank`` numbers given the token before it, among the ``top_k`` likeliest; rank 0
    means logits alone. Inputs and outputs of a sublayer are mixed over ``taps`` rows, with kernels
    that ``group`` channels share; 0 taps means no mixing. Embeddings are scaled as the target's are
    in transformers if ``as_target``, else not.
    """

    size: int
    from_anchor: bool = False
    causal_windows: bool = True
    causal: bool = False
    rank: int = 0
    top_k: int = 0
    taps: int = 0
    group: int = 1
    as_target: bool = False


@dataclass(frozen=True)
class Head:
    """A head as its checkpoint describes it; its kind is ``EAGLE1``, ``EAGLE3``, ``PEAGLE``,
    ``MEDUSA``, or one of ``BLOCKS``.

    The target must have ``vocab_size`` and ``hidden_size``. The head reads the outputs of the
    target's ``layers``, -1 for the embedding; None if they follow from the number of layers.
    ``architecture`` and ``config`` are those of its own layers, None for Medusa. The residual
    stream begins with a norm if ``state_normed``; a state that is fed back ends with one if
    ``output_normed``. ``fused_norms`` are the names of the norms of the target's hidden states, one
    per part. ``longest`` is the draft length that its metadata proposes, or the most that it can
    draft; ``verifier`` is its name of the target. ``mask_token`` is the token of rows that stand
    for later positions, and ``block`` says how ``BLOCKS`` draft. Each of Medusa's heads has
    residual ``blocks``, and an output matrix of its own unless it ``borrows_output`` from the
    target; ``choices`` is the tree that they draft (``read_choices``), None if it is learned.
    ``extras`` have recommended draft lengths and measured acceptance.
    """

    files: Files
    kind: str
    vocab_size: int
    hidden_size: int
    layers: tuple[int, ...] | None
    architecture: Architecture | None = None
    config: PlainConfig | None = None
    state_normed: bool = False
    output_normed: bool = False
    fused_norms: tuple[str, ...] = ()
    longest: int | None = None
    verifier: str | None = None
    mask_token: int | None = None
    block: Block | None = None
    blocks: int = 1
    borrows_output: bool = False
    choices: Paths | None = None
    extras: Extras = NO_EXTRAS

    @property
    def proposed(self) -> int | None:
        """The draft length that is recommended for chat, else the one that its format proposes."""
        chat = self.extras.lengths.get(CHAT)
        if self.kind == MEDUSA and chat is not None:
            return min(chat, self.longest or chat)  # its number of heads
        return self.longest if chat is None else chat

    @property
    def borrows_logits(self) -> bool:
        """True if its logits come from the target's output matrix."""
        own = self.architecture
        whole = own is not None and own.vocab_size == self.vocab_size
        return self.borrows_output or self.kind == EAGLE1 or (self.block is not None and whole)

    @property
    def folder(self) -> Path:
        """Its checkpoint's folder."""
        return self.files.folder

    def target_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the target's layers whose outputs the head reads."""
        if self.kind in (EAGLE1, MEDUSA):
            return (num_layers - 1,)
        # SafeAILab takes what enters layers 2, n / 2 and n - 3.
        usual = 1, num_layers // 2 - 1, num_layers - 4
        layers = usual if self.layers is None else self.layers
        if min(layers) < -1 or max(layers) >= num_layers:
            raise ModelError(
                f"{self.folder}: this head goes on from what layers {shown([*layers])} of its "
                f"target return (-1 is the embedding), but the target has {num_layers} layers; "
                "give the target that it was made for."
            )
        return layers


def read_head(folder: Path | Files) -> Head | None:
    """Return the head in ``folder``; None if the checkpoint is something else."""
    files = files_of(folder)
    options = files.config
    if options is None:
        return None
    values = Fields(options, str(files.folder / "config.json"))
    head = _read(files, values, options)
    return None if head is None else replace(head, extras=read_extras(values))


def _read(files: Files, values: Fields, options: dict[str, Any]) -> Head | None:
    """Return the head whose config has these ``options``, without extras."""
    kind = options.get("speculators_model_type")
    if kind is not None:
        return _speculators(files, values, options)
    if "dflash_config" in options:
        return _zlab(files, values, options)
    names = options.get("architectures")
    named = isinstance(names, list) and any("eagle3" in str(name).lower() for name in names)
    if named or ("draft_vocab_size" in options and has_midlayer(files)):
        return _safeailab(files, values, options)
    if "medusa_num_heads" in options:
        return _medusa(files, values)
    return _eagle1(files, values, options) if _is_eagle1(files, options) else None


def has_midlayer(files: Files) -> bool:
    """Return whether the layer of a head has the name that SafeAILab gives it."""
    return any(name.startswith(SAFEAILAB) for name in files.tensors)


def _is_eagle1(files: Files, options: dict[str, Any]) -> bool:
    """Return whether a checkpoint has the layout of EAGLE-1, as SafeAILab or vLLM write it."""
    return options.get("model_type") == "eagle" or (
        options.get("num_hidden_layers") == 1
        and all(any(name.startswith(own) for name in files.tensors) for own in EAGLE1_TENSORS)
        and "layers.0.hidden_norm.weight" not in files.tensors  # as in EAGLE-3
    )


def _eagle1(files: Files, values: Fields, options: dict[str, Any]) -> Head:
    """Return a head of EAGLE-1; vLLM's layout has the config of its layer in ``model``."""
    nested = options.get("model_type") == "eagle"
    layer, inner = (
        (values.section("model"), options.get("model") or {}) if nested else (values, options)
    )
    normed = [name for name in EAGLE1_NORMS if name in files.tensors]
    if normed:
        raise ModelError(
            f"{files} joins embedding and state by a linear as EAGLE-1 does, but has a norm more "
            f"({normed[0]}), which is not supported; give an EAGLE-3 head or Medusa heads."
        )
    vocab_size = layer.whole("vocab_size", 1)
    architecture, config = _architecture(files, inner, layer, vocab_size)
    return Head(files, EAGLE1, vocab_size, architecture.hidden_size, None, architecture, config)


def _layers_of(
    values: Fields, shift: int, name: str = "eagle_aux_hidden_state_layer_ids"
) -> tuple[int, ...] | None:
    if name not in values:
        return None
    layers = values.listed(name, int)
    if not layers or not all(0 <= layer <= LARGEST_INT for layer in layers):
        raise values.refuse(name, "a list of layers")
    return tuple(layer + shift for layer in layers)


def _architecture(
    files: Files, options: Any, values: Fields, vocabulary: int
) -> tuple[Architecture, PlainConfig]:
    """Return the architecture of a head's layers, and their config."""
    check_claims(options, files)
    family = options.get("model_type", "llama")
    if family not in FAMILIES:
        raise values.refuse("model_type", " or ".join(FAMILIES))
    given = {**options, "model_type": family, "vocab_size": vocabulary}
    given |= {"tie_word_embeddings": False, "quantization_config": None}
    config = plain_config(given, values.where)
    assert config is not None
    if options.get("layer_types") is not None:  # windows, which Llama's own models do not have
        config.layer_types = values.listed("layer_types", str)
        config.sliding_window = values.whole("sliding_window", default=0)
    shape = read_shape(config, files.folder)
    if not isinstance(shape, Architecture) or shape.activation != "silu":
        raise ModelError(
            f"{values.where}: layers with these options are not supported in a head; silu and a "
            "rope of all elements are needed."
        )
    return shape, config


def _speculators(files: Files, values: Fields, options: dict[str, Any]) -> Head:
    kind = values.text("speculators_model_type")
    if kind not in (EAGLE3, PEAGLE, *BLOCKS):
        known = ", ".join((EAGLE3, PEAGLE, *BLOCKS[:-1]))
        raise values.refuse("speculators_model_type", f"{known} or {BLOCKS[-1]}")
    layer = values.section("transformer_layer_config")
    inner = options.get("transformer_layer_config") or {}
    vocab_size = layer.whole("vocab_size", 1)
    about = values.section("speculators_config")
    verifier = about.section("verifier").text("name_or_path", "") or None
    drafted = values.whole("draft_vocab_size", 1)
    if kind in BLOCKS:
        sizes = vocab_size, drafted
        return replace(
            _block_head(files, kind, values, layer, inner, _block(values, kind), sizes),
            layers=_required(values, "aux_hidden_state_layer_ids", -1),
            mask_token=values.whole("mask_token_id", 0, vocab_size - 1),
            verifier=verifier,
        )
    own = _architecture(files, inner, layer, drafted)
    return replace(
        _eagle(files, values, options, vocab_size, own),
        kind=kind,
        longest=_proposed(about),
        verifier=verifier,
        mask_token=values.whole("mask_token_id", 0, vocab_size - 1) if kind == PEAGLE else None,
    )


def _eagle(
    files: Files, values: Fields, options: dict[str, Any], vocab_size: int,
    own: tuple[Architecture, PlainConfig],
) -> Head:  # fmt: skip
    """Return an EAGLE-3 head with the architecture and the config of its layers."""
    return Head(
        files=files,
        kind=EAGLE3,
        vocab_size=vocab_size,
        hidden_size=values.whole("target_hidden_size", 1, default=own[0].hidden_size),
        # A layer's input is the output of the one before.
        layers=_layers_of(values, -1),
        architecture=own[0],
        config=own[1],
        state_normed=values.flag("norm_before_residual", False),
        output_normed=values.flag("norm_output", False),
        fused_norms=_norms(values, options),
    )


def _norms(values: Fields, options: dict[str, Any]) -> tuple[str, ...]:
    together, apart = (values.flag(name, False) for name in ("norm_before_fc", "fc_norm"))
    if together and apart:
        raise values.refuse("fc_norm", "one of norm_before_fc and fc_norm")
    layers = values.listed("eagle_aux_hidden_state_layer_ids", int)
    if together:
        return ("input_norm.weight",)
    return tuple(f"fc_norm.{i}.weight" for i in range(len(layers) or PARTS)) if apart else ()


def _block_head(
    files: Files, kind: str, values: Fields, layer: Fields, options: dict[str, Any], block: Block,
    sizes: tuple[int, int],
) -> Head:  # fmt: skip
    """Return a head of ``BLOCKS``, whose layers are Qwen3's, without its target's.

    ``sizes`` are the number of the target's ids, and of those that it drafts.
    """
    given = {**options, "model_type": "qwen3"}
    own = _architecture(files, given, layer, sizes[1])
    width, kinds = own[0].hidden_size, layer.listed("layer_types", str)
    if "sliding_attention" in kinds and not layer.whole("sliding_window", default=0):
        raise layer.refuse("sliding_window", "a window")
    if values.whole("target_hidden_size", 1, default=width) != width:
        raise values.refuse("target_hidden_size", f"{width}, as wide as its layers,")
    if block.taps and width % block.group:
        raise values.refuse("conv_group_size", f"a divisor of the width, {width},")
    if block.taps > block.size:
        raise values.refuse("conv_kernel_size", f"a number up to block_size, {block.size},")
    longest = block.size if block.from_anchor else block.size - 1
    return Head(files, kind, sizes[0], width, None, *own, longest=longest, block=block)


def _required(values: Fields, name: str, shift: int) -> tuple[int, ...]:
    layers = _layers_of(values, shift, name)
    if layers is None:
        raise values.refuse(name, "a list of layers")
    return layers


def _block(values: Fields, kind: str) -> Block:
    """Return how a head of the ``speculators`` library drafts."""
    block = Block(
        values.whole("block_size", 2, LARGEST_DRAFT),
        values.flag("sample_from_anchor", kind == DSPARK),
        not values.flag("sliding_window_non_causal", kind == DFLASH2),
    )
    if kind == DFLASH2:
        return replace(
            block, rank=values.whole("selector_rank", 1, MOST_RANK, default=256),
            top_k=values.whole("selector_top_k", 1, MOST_CANDIDATES, default=16),
            taps=values.whole("conv_kernel_size", 1, MOST_TAPS, default=2),
            group=values.whole("conv_group_size", 1, default=16),
        )  # fmt: skip
    if kind == DFLASH:
        return block
    rank = values.whole("markov_rank", 0, MOST_RANK, default=256)
    if rank and values.text("markov_head_type", "vanilla") != "vanilla":
        raise values.refuse("markov_head_type", "vanilla")
    return replace(block, rank=rank, top_k=MOST_CANDIDATES)


def _zlab(files: Files, values: Fields, options: dict[str, Any]) -> Head:
    """Return a head of DFlash in the layout of its authors."""
    about = values.section("dflash_config")
    more = about.flag("fc_layernorm", False) or "conv_type" in about
    if more or about.text("projector_type", DFLASH) != DFLASH:
        raise ModelError(
            f"{about.where} has more than DFlash (fc_layernorm, conv_type or projector_type); "
            "give DFlash2 and DSpark in the layout of speculators."
        )
    size = about if "block_size" in about else values
    block = Block(
        size.whole("block_size", 2, LARGEST_DRAFT), causal=values.flag("is_causal", False),
        as_target=True,
    )  # fmt: skip
    vocab_size = values.whole("vocab_size", 1)
    sizes = vocab_size, vocab_size
    return replace(
        _block_head(files, DFLASH, values, values, options, block, sizes),
        layers=_required(about, "target_layer_ids", 0),
        mask_token=about.whole("mask_token_id", 0, vocab_size - 1),
    )


def _proposed(about: Fields) -> int | None:
    """Return the draft length of a speculator's first proposal method; None if it has none."""
    methods = about.listed("proposal_methods", dict)
    first = Fields(methods[0] if methods else {}, f"{about.where}: proposal_methods")
    name = "speculative_tokens"
    return first.whole(name, 1, LARGEST_DRAFT) if name in first else None


def _safeailab(files: Files, values: Fields, options: dict[str, Any]) -> Head:
    vocab_size = values.whole("vocab_size", 1)
    drafted = values.whole("draft_vocab_size", 1, default=vocab_size)
    plain = {name: value for name, value in options.items() if name != "draft_vocab_size"}
    own = _architecture(files, plain, values, drafted)
    head, section = _eagle(files, values, options, vocab_size, own), values.section("eagle_config")
    # SpecForge names the layers whose outputs are taken; vLLM, at the top, those that they enter.
    return head if head.layers is not None else replace(head, layers=_layers_of(section, 0))


def _medusa(files: Files, values: Fields) -> Head:
    folder, tensors = files.folder, files.tensors
    numbers = {name.partition(".")[0] for name in tensors if name[:1].isdigit()}
    heads = values.whole("medusa_num_heads", 1, MOST_HEADS)
    if len(numbers) < heads:  # some checkpoints have more than they use
        raise ModelError(
            f"{folder}: its config.json says medusa_num_heads is {heads}, but its tensors are of "
            f"{len(numbers)} heads; convert the checkpoint again."
        )
    blocks = values.whole("medusa_num_layers", 0, MOST_BLOCKS, default=1)
    name = f"0.{blocks}.weight"
    last, packed = tensors.get(name), tensors.get(f"{name}_shape")
    borrows = last is None and packed is None and values.flag(BORROWS, False)
    shape: tuple[int, ...] = () if last is None else last.shape
    if borrows:
        shape = values.whole("vocab_size", 1), values.whole("hidden_size", 1)
    elif packed is not None and (packed.type, packed.shape) == ("I64", (2,)):
        shape = tuple(map(int, packed.read()))
    if len(shape) != 2 or min(shape) < 1:
        raise ModelError(f"{folder} has no matrix {name!r}; its config.json promises one.")
    vocab_size, hidden_size = shape
    verifier = values.text("base_model_name_or_path", "") or None
    choices = read_choices(values, heads)
    return Head(
        files, MEDUSA, vocab_size, hidden_size, None,
        longest=heads, verifier=verifier, blocks=blocks, borrows_output=borrows, choices=choices,
    )  # fmt: skip


def read_choices(values: Fields, heads: int) -> Paths | None:
    """Return the tree in ``medusa_choices``; None if it is missing.

    A tree is a list of paths, [0, 2] for the third likeliest token after the likeliest one.
    """
    name = "medusa_choices"
    if name not in values:
        return None
    holds = f"{values.where}: {name} holds"
    paths = values.listed(name, list)
    if not 1 <= len(paths) <= MOST_CHOICES:
        raise values.refuse(name, f"a list of 1 to {MOST_CHOICES} paths")
    for path in paths:
        if not path or not all(type(rank) is int and 0 <= rank < TOP_K for rank in path):
            remedy = f"a list of ranks from 0 to {TOP_K - 1} is needed"
            raise ModelError(f"{holds} {shown(path)}; {remedy}.")
        if len(path) > heads:
            deep = f"which is {len(path)} tokens deep, but there are {heads} heads"
            raise ModelError(f"{holds} {shown(path)}, {deep}; leave it out.")
    known = {tuple(path) for path in paths}
    for path in sorted(known):
        if path[:-1] and path[:-1] not in known:
            missing = f"without {[*path[:-1]]}, which it goes on from"
            raise ModelError(f"{holds} {[*path]} {missing}; add that.")
    if len(known) < len(paths):
        raise values.refuse(name, "a list in which each path stands once")
    return tuple(sorted(known))


def check_target(head: Head, target: Shape, hidden_size: int, num_layers: int) -> None:
    """Refuse a target that a head was not made for; both values are named."""
    for what, own, other in (
        ("vocabulary", head.vocab_size, target.vocab_size),
        ("width", head.hidden_size, hidden_size),
    ):
        if own != other:
            named = f" ({head.verifier})" if head.verifier else ""
            raise ModelError(
                f"{head.folder}: this head was made for a target with a {what} of {own}, but that "
                f"of the target is {other}; give the target that it was made for{named}."
            )
    head.target_layers(num_layers)
