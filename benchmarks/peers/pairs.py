"""The pairs that peers are measured with, and the recipe of the planted ones.

A *planted pair* has random weights. The drafter is the target's first layers with its embeddings,
last norm and head; what the later layers add to the residual stream is scaled down until the
drafter agrees with the target on about nine tokens of ten. So the pair costs what a trained pair of
its shape costs and accepts as a good one does, and says nothing of a trained pair's acceptance.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from outrider import pocket
from outrider.base.types import SamplingParams
from outrider.bench.workload import CODE
from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.checkpoints.dtypes import BFLOAT16, Array
from outrider.checkpoints.files import save_file
from outrider.checkpoints.folders import find_folder
from outrider.checkpoints.formats.gguf import is_gguf
from outrider.checkpoints.tokenizers import read_codec
from outrider.cli.bench import named_workload
from outrider.drafters.registry import sibling
from outrider.errors import ConfigError
from outrider.llm import LLM

from ..install import home, say

PROMPT_TOKENS = 128
PROMPTS = 32
MEASURED = 4
"""Prompts over which a planted drafter's agreement is measured, 128 tokens each."""
RANGE = (0.88, 0.92)
"""The range of a planted drafter's agreement."""
VERSION = 1
"""Part of the folder's name: a changed recipe makes a new folder."""


@dataclass(frozen=True)
class Recipe:
    """A planted pair. Lengths in elements; ``later`` scales what layers from ``drafted`` on add."""

    name: str
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    tied: bool
    theta: float
    later: float
    drafted: int = 2
    seed: int = 20261121

    @property
    def head(self) -> int:
        return self.hidden // self.heads

    @property
    def folder(self) -> Path:
        return home() / "models" / f"{self.name}-v{VERSION}"

    def config(self, layers: int) -> dict[str, Any]:
        """A Llama's config.json with that many layers."""
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
            "vocab_size": self.vocabulary, "hidden_size": self.hidden,
            "intermediate_size": self.intermediate, "num_hidden_layers": layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
            "head_dim": self.head, "hidden_act": "silu", "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192, "tie_word_embeddings": self.tied,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.theta},
            "rope_theta": self.theta, "attention_bias": False, "mlp_bias": False,
            "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1,
        }  # fmt: skip

    def tensors(self) -> Iterator[tuple[str, Array]]:
        """The target's weights by name, bfloat16, one by one in a fixed order.

        Normal numbers from NumPy's Philox. Logits have a standard deviation of 3, attention looks
        at few positions, and a layer adds much more than the embedding holds, so that tied
        embeddings do not make the model repeat its last token.
        """
        draw = np.random.Generator(np.random.Philox(self.seed))
        ones = np.ones(self.hidden, BFLOAT16)
        wide, narrow = self.hidden**-0.5, self.intermediate**-0.5
        lanes, kv = self.heads * self.head, self.kv_heads * self.head

        def normal(rows: int, columns: int, deviation: float) -> Array:
            values = draw.standard_normal((rows, columns), dtype=np.float32)
            values *= np.float32(deviation)
            return values.astype(BFLOAT16)

        yield "model.embed_tokens.weight", normal(self.vocabulary, self.hidden, 3 * wide)
        for i in range(self.layers):
            scale = 3.0 if i < self.drafted else 3.0 * self.later
            matrices = {
                "self_attn.q_proj": (lanes, self.hidden, 2.5 * wide),
                "self_attn.k_proj": (kv, self.hidden, wide),
                "self_attn.v_proj": (kv, self.hidden, wide),
                "self_attn.o_proj": (self.hidden, lanes, scale * lanes**-0.5),
                "mlp.gate_proj": (self.intermediate, self.hidden, wide),
                "mlp.up_proj": (self.intermediate, self.hidden, wide),
                "mlp.down_proj": (self.hidden, self.intermediate, scale * narrow),
            }
            for name, shape in matrices.items():
                yield f"model.layers.{i}.{name}.weight", normal(*shape)
            for name in ("input_layernorm", "post_attention_layernorm"):
                yield f"model.layers.{i}.{name}.weight", ones.copy()
        yield "model.norm.weight", ones
        if not self.tied:
            yield "lm_head.weight", normal(self.vocabulary, self.hidden, 3 * wide)

    def drafters(self, name: str) -> bool:
        """True for a tensor that the drafter has too."""
        parts = name.split(".")
        return parts[1] != "layers" or int(parts[2]) < self.drafted


PLANTED = Recipe(
    "planted", vocabulary=4096, hidden=768, intermediate=2048, layers=12, heads=12, kv_heads=12,
    tied=False, theta=1e4, later=0.025,
)  # fmt: skip
GQA = Recipe(
    "gqa", vocabulary=4096, hidden=1024, intermediate=2816, layers=10, heads=16, kv_heads=4,
    tied=False, theta=1e4, later=0.025,
)  # fmt: skip
ONE_B = Recipe(
    "1b", vocabulary=128256, hidden=2048, intermediate=8192, layers=16, heads=32, kv_heads=8,
    tied=True, theta=5e5, later=0.0135,
)  # fmt: skip
RECIPES = {recipe.name: recipe for recipe in (PLANTED, GQA, ONE_B)}


@dataclass(frozen=True)
class Pair:
    """A target, its drafter (None: only prompt lookup can draft), and distinct prompts as ids.

    ``single`` of the prompts, the first, are run one by one; ``agreement`` is a planted drafter's,
    on the target's own greedy path, None for others.
    """

    name: str
    target: Path
    drafter: Path | None
    prompts: list[list[int]]
    single: int
    agreement: float | None = None

    @property
    def is_file(self) -> bool:
        """True if every engine reads the same GGUF files."""
        return is_gguf(self.target)

    def long_prompt(self, tokens: int) -> list[int]:
        """The prompts one after the other, over and over, up to that length."""
        joined = [token for prompt in self.prompts for token in prompt]
        return (joined * -(-tokens // len(joined)))[:tokens]


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """The pocket pair's tokenizer, filled up to ``vocabulary`` entries that no text comes to."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(pocket.PATH / name, folder / name)
    file = folder / "tokenizer.json"
    made = json.loads(file.read_text(encoding="utf-8"))
    known = made["model"]["vocab"]
    taken = {*known.values(), *(added["id"] for added in made["added_tokens"])}
    known.update({f"<filler {i}>": i for i in range(vocabulary) if i not in taken})
    file.write_text(json.dumps(made, ensure_ascii=False), encoding="utf-8")


def write_pair(recipe: Recipe, folder: Path) -> None:
    """Write both checkpoints, the drafter's in the sub-folder ``drafter``."""
    target = dict(recipe.tensors())
    drafter = {name: tensor for name, tensor in target.items() if recipe.drafters(name)}
    for place, layers, tensors in (
        (folder, recipe.layers, target), (folder / "drafter", recipe.drafted, drafter),
    ):  # fmt: skip
        place.mkdir(parents=True)
        config = recipe.config(layers)
        ends = {name: config[name] for name in ("eos_token_id", "pad_token_id")}
        for name, content in (("config.json", config), ("generation_config.json", ends)):
            (place / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
        write_tokenizer(place, recipe.vocabulary)
        save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})


def random_prompts(
    seed: int, vocabulary: int, count: int = PROMPTS, length: int = PROMPT_TOKENS
) -> list[list[int]]:
    """Return prompts of random ids, none below 8: those may be special tokens."""
    draw = np.random.Generator(np.random.Philox(seed))
    return list(draw.integers(8, vocabulary, (count, length)).tolist())


def measure_agreement(target: Path, drafter: Path, prompts: list[list[int]], tokens: int) -> float:
    """Share of the target's greedy tokens that are the drafter's argmax too, in bf16, 0 to 1."""
    given: dict[str, Any] = {
        "drafter": None, "dtype": "bfloat16", "max_num_seqs": 1,
        "max_model_len": PROMPT_TOKENS + tokens + 1,
    }  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    outputs = LLM(target, **given).generate(list(prompts), params)
    paths = [out.prompt_token_ids + out.outputs[0].token_ids for out in outputs]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    agreed = 0
    for path, out in zip(paths, LLM(drafter, **given).generate(list(paths), params), strict=True):
        ranked = list(zip(path, out.prompt_logprobs or (), strict=True))[-tokens:]
        agreed += sum(
            logprobs is not None and logprobs[token].rank == 1 for token, logprobs in ranked
        )
    return agreed / (tokens * len(paths))


def build(recipe: Recipe, prompts: list[list[int]]) -> None:
    """Make the pair in its folder, the drafter in the sub-folder ``drafter``, and measure it."""
    parts = recipe.folder.with_name(recipe.folder.name + ".part")
    shutil.rmtree(parts, ignore_errors=True)
    say(f"making the pair {recipe.name} in {recipe.folder}")
    write_pair(recipe, parts)
    agreement = measure_agreement(parts, parts / "drafter", prompts, 128)
    (parts / "planted.json").write_text(json.dumps({"agreement": agreement}), encoding="utf-8")
    shutil.rmtree(recipe.folder, ignore_errors=True)
    parts.rename(recipe.folder)
    say(f"{recipe.name}: the drafter agrees on {agreement:.3f} of the target's greedy tokens")
    if not RANGE[0] <= agreement <= RANGE[1]:
        say(f"{recipe.name}: that is outside {RANGE[0]} to {RANGE[1]}; change the recipe's scale")


def split_pairs(text: str) -> list[str]:
    """Return the pairs of a comma list; a GGUF file right behind another one is its drafter."""
    found: list[str] = []
    for part in text.split(","):
        if found and "," not in found[-1] and is_gguf(Path(part)) and is_gguf(Path(found[-1])):
            found[-1] += f",{part}"
        else:
            found.append(part)
    return list(dict.fromkeys(found))


def find_pair(which: str, count: int | None = None, prompts: str = CODE) -> Pair:
    """The pair of that name, made where it is not there yet, the checkpoint at that path or name,
    or "TARGET.gguf,DRAFTER.gguf".

    ``count`` is how many prompts are run one by one; 4 of the held-out code prompts (2 of a planted
    pair) unless given. ``prompts`` is a workload's name or file; a planted pair has its own.
    """
    if count is not None and not 1 <= count <= PROMPTS:
        raise ConfigError(f"num_prompts is {count}; give 1 to {PROMPTS}.")
    if recipe := RECIPES.get(which):
        note = recipe.folder / "planted.json"
        made = random_prompts(recipe.seed + 1, recipe.vocabulary)
        if not note.exists():
            build(recipe, made[:MEASURED])
        agreement = json.loads(note.read_text(encoding="utf-8"))["agreement"]
        return Pair(which, recipe.folder, recipe.folder / "drafter", made, count or 2, agreement)
    items = named_workload(prompts).items[:PROMPTS]
    target, _, beside = which.partition(",")
    folder = find_folder(pocket.PATH if which == "pocket" else target)
    drafter = find_folder(beside) if beside else sibling(folder)
    for model in filter(None, (folder, drafter)):
        open_checkpoint(model)  # says best what is wrong with a folder that holds no model
    codec = read_codec(folder)
    name = " + ".join(Path(part).stem for part in which.split(",")) if is_gguf(folder) else which
    return Pair(name, folder, drafter, [item.encode(codec) for item in items], count or 4)
