"""Replay targets: recorded answers at the cost of a real model.

A small model that writes code cannot write prose or edit a file, so speculation on such text is
measured on a scripted target: a real Transformer with random weights, whose logits are replaced by
a planted distribution, peaked on the next token of a recorded answer. Planted drafters agree with
it as often as chosen (``bench/distributions.py`` has both). Speeds on a replay target are those of
its size, answers and agreement, not of a trained model.

Where that differs from trained models: a planted drafter errs at each position independently. One
that costs nothing drafts its most likely token as certain, so that above temperature 0 it is
accepted less often than it agrees. Under a JSON schema, which masks the planted distributions and
cuts or repairs drafts, more is accepted.

A distribution is a function of (workload seed, index in the output, the recorded token there)
alone: after a sampled token that differs, the recording continues at the next index, and after its
end comes EOS.
"""

import json
import math
import re
import shutil
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import ml_dtypes
import numpy as np

from ..base.methods import AUTO, TOGETHER
from ..base.types import Request, SequenceState
from ..checkpoints.architecture import Shape
from ..checkpoints.checkpoint import open_checkpoint
from ..checkpoints.files import save_file
from ..drafters.base import ChainDrafter, Drafter, DrafterContext, DrafterSpec, Needs
from ..drafters.model import ModelSpec
from ..drafters.registry import GroupSpec, find_drafter
from ..drafters.suffix import SuffixSpec
from ..engine.build import build_engine, load_target
from ..engine.setup import set_up
from ..errors import ConfigError
from ..llm import LLM
from ..models.base import Model, Output, Store
from ..models.decide import DraftInput, DraftNodes, SampleInput, Samples
from ..models.rows import Segment, Track, plant
from ..sampling.shared_noise import Noise
from .distributions import planted_track, target_track

ABOUT = "random weights at the cost of a real model, distributions planted on recorded answers"
HEAD_DIM = 64
SPREAD = 0.02
"""Standard deviation of random weights."""


@dataclass(frozen=True)
class ReplaySize:
    """A Llama's shape, heads of 64: what a forward costs.

    With ``experts``, each of ``inner`` elements, it is a Qwen3-MoE's; a row is routed to ``top`` of
    them.
    """

    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    experts: int = 0
    top: int = 0

    def parameters(self, vocab_size: int) -> int:
        return sum(map(math.prod, self.tensors(vocab_size).values()))

    def tensors(self, vocab_size: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all weights, by their names in a checkpoint."""
        queries, keys = HEAD_DIM * self.heads, HEAD_DIM * self.kv_heads
        shapes: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (queries, self.width),
            "self_attn.k_proj": (keys, self.width),
            "self_attn.v_proj": (keys, self.width),
            "self_attn.o_proj": (self.width, queries),
            "input_layernorm": (self.width,),
            "post_attention_layernorm": (self.width,),
        }
        mlps = [f"mlp.experts.{i}" for i in range(self.experts)] or ["mlp"]
        for mlp in mlps:
            shapes |= dict.fromkeys(
                (f"{mlp}.gate_proj", f"{mlp}.up_proj"), (self.inner, self.width)
            )
            shapes[f"{mlp}.down_proj"] = (self.width, self.inner)
        if self.experts:
            shapes["mlp.gate"] = (self.experts, self.width)
            shapes |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (HEAD_DIM,))
        layers = {
            f"model.layers.{layer}.{name}.weight": shape
            for layer in range(self.layers)
            for name, shape in shapes.items()
        }
        outer = {"embed_tokens": (vocab_size, self.width), "norm": (self.width,)}
        return {f"model.{name}.weight": shape for name, shape in outer.items()} | layers


# Named by their weights with a vocabulary of 4,096; 3m is the shape of the pocket pair's drafter.
SIZES = {
    "1m": ReplaySize(2, 128, 256, 2, 1),
    "3m": ReplaySize(2, 384, 384, 6, 2),
    "20m": ReplaySize(12, 384, 1024, 6, 2),
    "100m": ReplaySize(15, 768, 2048, 12, 4),
    "300m": ReplaySize(26, 1024, 2816, 16, 4),
    "480m-a85m": ReplaySize(16, 768, 384, 12, 4, experts=32, top=4),  # a mixture of experts
}


def find_size(name: str) -> ReplaySize:
    """Return the size of that name. Raises ConfigError: there is none."""
    if name not in SIZES:
        raise ConfigError(f"replay size {name!r} is not known; give one of {', '.join(SIZES)}.")
    return SIZES[name]


def write_random(
    size: ReplaySize, folder: Path, vocab_size: int, context: int, eos: Collection[int], seed: int
) -> None:
    """Save a model of random weights, the same every time, in bf16."""
    folder.mkdir(exist_ok=True)
    family, name = ("qwen3_moe", "Qwen3Moe") if size.experts else ("llama", "Llama")
    config = {
        "architectures": [f"{name}ForCausalLM"], "model_type": family, "dtype": "bfloat16",
        "vocab_size": vocab_size, "hidden_size": size.width, "intermediate_size": size.inner,
        "num_hidden_layers": size.layers, "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads, "head_dim": HEAD_DIM, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": context, "tie_word_embeddings": True,
        "eos_token_id": sorted(eos) or None,
    }  # fmt: skip
    if size.experts:
        config |= {
            "num_experts": size.experts, "num_experts_per_tok": size.top,
            "moe_intermediate_size": size.inner, "norm_topk_prob": True,
        }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    rng = np.random.default_rng(seed)
    weights = {
        name: (
            np.ones(shape) if len(shape) == 1 else rng.standard_normal(shape, np.float32) * SPREAD
        ).astype(ml_dtypes.bfloat16)
        for name, shape in size.tensors(vocab_size).items()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


LOOKUPS = ("ngram", "suffix")  # drafters that work for a replay target as for any other


def parse_planted(drafter: str) -> tuple[float, str | None]:
    """Return how often a planted drafter agrees, and the size whose cost it has; None for no cost.

    "planted:0.8" costs nothing, "planted:0.8:3m" a model of 3M parameters. Raises ConfigError: it
    is neither.
    """
    parts = re.fullmatch(r"planted:(\d*\.?\d+)(?::(\w+))?", drafter)
    if not parts or not 0 <= float(parts[1]) <= 1:
        raise ConfigError(
            f"drafter {drafter!r} is not one of a replay target; give ngram, suffix, or "
            "planted:AGREEMENT with a share from 0 to 1, and :SIZE after it for its cost; "
            "several joined by +, or auto+ and those that it may choose."
        )
    if parts[2]:
        find_size(parts[2])
    return float(parts[1]), parts[2]


def parts_of(drafter: str) -> tuple[list[str], bool]:
    """Return the drafters that ``drafter`` joins, whether auto chooses; or raise ConfigError."""
    parts = drafter.split(TOGETHER)
    auto = AUTO in parts and len(parts) > 1
    parts = [part for part in parts if not (auto and part == AUTO)]
    for part in parts:
        if part not in LOOKUPS:
            parse_planted(part)
    if len({part.split(":")[0] for part in parts}) < len(parts):
        raise ConfigError(f"drafter {drafter!r} joins two of a kind; give different ones.")
    return parts, auto


def prompt_key(prompt: Sequence[int]) -> bytes:
    """Return the key of a prompt."""
    return np.asarray(prompt, np.int32).tobytes()


Tracks = Mapping[bytes, Track]
MOST_SEQUENCES = 4096  # most sequences whose tracks are cached
COPIED = ("dtype", "device", "trees", "truncates", "paged", "hidden_layers", "hidden_size")


class ReplayModel(Model):
    """Runs another model, with logits from the prompt's track in ``tracks``, by ``prompt_key``.

    A row's logits depend only on its prompt and position; without a track they are the model's.
    """

    def __init__(self, model: Model, tracks: Tracks) -> None:
        # Without the other's windows: planted distributions depend on the whole prompt.
        self.shape = Shape(
            **{field.name: getattr(model.shape, field.name) for field in fields(Shape)}
        )
        for name in COPIED:
            setattr(self, name, getattr(model, name))
        self._model, self._tracks = model, tracks
        self._prompts: dict[str, bytes] = {}
        self._by_sequence: dict[str, tuple[Request, Track | None]] = {}

    def page_bytes(self, page_size: int) -> int:
        return self._model.page_bytes(page_size)

    def new_store(self, num_pages: int, page_size: int) -> Store:
        return self._model.new_store(num_pages, page_size)

    def run(self, segments: Sequence[Segment], store: Store, hidden: Sequence[int] = ()) -> Output:
        """Return the other model's output with planted logits; prompts must be run in full."""
        planted = [each._replace(planted=self._tracks.get(self._seen(each))) for each in segments]
        output = self._model.run(planted, store, hidden)
        if output.logits is not None:
            plant(output.logits, planted)
        return output

    def decide(
        self,
        segments: Sequence[Segment],
        store: Store,
        inputs: Sequence[SampleInput | None],
        noise: Noise | None,
        hidden: Sequence[int] = (),
    ) -> Samples:
        return self._model.decide(self.planted(segments, inputs), store, inputs, noise, hidden)

    def draft(
        self,
        segments: Sequence[Segment],
        store: Store,
        inputs: Sequence[DraftInput | None],
        noise: Noise,
        needs_logits: bool = False,
    ) -> list[DraftNodes]:
        planted = self.planted(segments, inputs)
        return self._model.draft(planted, store, inputs, noise, needs_logits)

    def planted(
        self, segments: Sequence[Segment], inputs: Sequence[SampleInput | DraftInput | None]
    ) -> list[Segment]:
        """Return the segments with what is planted for their sequences' prompts."""
        return [
            segment if asked is None else segment._replace(planted=self._track(asked.sequence))
            for segment, asked in zip(segments, inputs, strict=True)
        ]

    def _track(self, sequence: SequenceState) -> Track | None:
        request, track = self._by_sequence.get(sequence.id, (None, None))
        if request is not sequence.request:
            track = self._tracks.get(prompt_key(sequence.request.prompt_token_ids))
            if len(self._by_sequence) == MOST_SEQUENCES:
                self._by_sequence.clear()
            self._by_sequence[sequence.id] = sequence.request, track
        return track

    def _seen(self, segment: Segment) -> bytes:
        """Return the key of the prompt of a segment's sequence, up to this segment."""
        rest = segment.prompt_length - segment.start
        if rest > 0:
            before = self._prompts[segment.key] if segment.start else b""
            self._prompts[segment.key] = before + prompt_key(segment.tokens[:rest])
        return self._prompts[segment.key]


class PlantedDrafter(ChainDrafter):
    """Drafts the tokens in ``tracks``, at no cost."""

    name = "planted"
    peek = Drafter.peek  # it shows only its drafts

    def __init__(self, tracks: Tracks, max_length: int) -> None:
        super().__init__(max_length)
        self._tokens: dict[bytes, list[int]] = {
            key: track.ids[:, 0].tolist() for key, track in tracks.items()
        }

    def draft(self, sequence: SequenceState, length: int) -> list[int]:
        tokens = self._tokens.get(prompt_key(sequence.request.prompt_token_ids), [])
        return tokens[sequence.num_output : sequence.num_output + length]


@dataclass(frozen=True)
class PlantedSpec(DrafterSpec):
    """Makes a ``PlantedDrafter``."""

    name = PlantedDrafter.name
    tracks: Tracks

    def make(self, context: DrafterContext) -> PlantedDrafter:
        return PlantedDrafter(self.tracks, context.config.max_draft_length)


@dataclass(frozen=True, kw_only=True)
class ReplayedSpec(ModelSpec):
    """A checkpoint as drafter, whose logits are planted from ``tracks``."""

    tracks: Tracks

    def needs(self, context: DrafterContext) -> Needs:
        needs = super().needs(context)
        model, _ = needs.loaded  # planted tracks cover all ids
        return replace(needs, loaded=(ReplayModel(model, self.tracks), None))


class Replay:
    """A replay target: its answers, and engines that run it; ``about`` describes it in reports.

    It takes tokenizer, vocabulary, EOS and context from the checkpoint ``source``. Raises
    ConfigError: the size is not known, an answer is shorter than 2 tokens, or one prompt has two
    answers.
    """

    def __init__(
        self,
        size: str,
        source: Path,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        seed: int = 0,
    ) -> None:
        self._size, self._seed, self._source = size, seed, source
        self._shape = open_checkpoint(source).shape
        parameters = find_size(size).parameters(self._shape.vocab_size)
        self.about = {"size": size, "parameters": parameters, "seed": seed, "what": ABOUT}
        end = min(self._shape.eos_token_ids, default=0)
        recorded: dict[bytes, list[int]] = {}
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True), 1):
            if len(answer) < 2:
                raise ConfigError(
                    f"the answer to prompt {i} is shorter than 2 tokens; lengthen it."
                )
            if recorded.setdefault(prompt_key(prompt), [*answer, end]) != [*answer, end]:
                raise ConfigError(
                    f"prompt {i} came before with another answer, and a replay target knows its "
                    "answers by their prompts; change one of the two."
                )
        self.tracks: Tracks = {
            key: target_track(answer, self._shape.vocab_size, seed)
            for key, answer in recorded.items()
        }
        self._models: dict[tuple[Any, ...], Model] = {}
        self._place = Path(mkdtemp(prefix="outrider-replay-"))
        weakref.finalize(self, shutil.rmtree, self._place, ignore_errors=True)

    def open(self, drafter: str, **options: Any) -> LLM:
        """Return an ``LLM`` of this target with a drafter: "none", a lookup or a planted one.

        Names joined by "+" draft together. After "auto+" they are what auto chooses among, besides
        suffix and predictions. Targets with the same options share their weights.
        """
        spec = find_drafter(None, self._source) if drafter == "none" else self._spec(drafter)
        target = self._folder(self._size)
        setup = set_up(target, spec, {"enable_prefix_caching": False, **options})
        key = setup.config.dtype, setup.config.quantization, setup.facts.max_model_len
        if key not in self._models:
            self._models[key] = load_target(setup.checkpoint, setup.config)
        model = ReplayModel(self._models[key], self.tracks)
        return LLM.from_engine(setup, build_engine(setup, model=model))

    def _spec(self, drafter: str) -> DrafterSpec:
        parts, auto = parts_of(drafter)
        if auto and SuffixSpec.name not in parts:
            parts.append(SuffixSpec.name)
        members = [
            find_drafter(part, self._source) if part in LOOKUPS else self._planted(part)
            for part in parts
        ]
        return GroupSpec(tuple(members), auto) if len(parts) > 1 else members[0]

    def _planted(self, drafter: str) -> DrafterSpec:
        agreement, size = parse_planted(drafter)
        tracks = {
            key: planted_track(track, self._shape.vocab_size, self._seed, agreement)
            for key, track in self.tracks.items()
        }
        return (
            PlantedSpec(tracks) if size is None else ReplayedSpec(self._folder(size), tracks=tracks)
        )

    def _folder(self, size: str) -> Path:
        folder, shape = self._place / size, self._shape
        if not folder.exists():
            write_random(
                find_size(size), folder, shape.vocab_size, shape.context, shape.eos_token_ids,
                self._seed,
            )  # fmt: skip
            for file in (*self._source.glob("tokenizer*"), *self._source.glob("*.jinja")):
                shutil.copy(file, folder)
        return folder
