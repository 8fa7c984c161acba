"""The cost of quantisation: quantised weights against the checkpoint's own, over text.

Both models read the same windows of text, and every position is compared. Windows are as
independent as the text allows, so that means over windows have intervals.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import Any

import numpy as np
from tqdm import tqdm

from ..base.config import Recipe
from ..base.types import Folder
from ..checkpoints.export import bits_per_weight
from ..checkpoints.folders import find_folder
from ..checkpoints.tokenizers import read_codec
from ..errors import ConfigError
from ..llm import LLM
from ..models.base import Model
from ..models.rows import Segment
from ..sampling.arrays import log_sum_exp
from ..sampling.pipeline import Logits
from ..text.codec import TextCodec

WINDOW_TOKENS = 512  # tokens of a window, at most the model's context
LEAST_WINDOWS = 8  # fewer windows give no useful interval
CONFIDENCE = 0.95
PAGE_SIZE = 16
METHOD = "mean over windows, normal approximation; of the perplexity's loss, over paired windows"


def cut(texts: Sequence[str], codec: TextCodec, length: int, most: int) -> list[list[int]]:
    """Return at most ``most`` windows of ``length`` tokens, evenly spread over the texts.

    Each begins with the tokens that the tokenizer puts before a text; a rest that does not fill a
    window is left out. Raises ConfigError: there are fewer than ``LEAST_WINDOWS``.
    """
    before = codec.encode("")
    size = length - len(before)
    pieces = []
    for text in texts:
        ids = codec.backend.encode(text, add_special_tokens=False).ids
        pieces += [[*before, *ids[i : i + size]] for i in range(0, len(ids) - size + 1, size)]
    if len(pieces) < LEAST_WINDOWS:
        raise ConfigError(
            f"the text fills {len(pieces)} windows of {length} tokens, and {LEAST_WINDOWS} are the "
            "least; give more text."
        )
    count = min(most, len(pieces))
    return [pieces[i * len(pieces) // count] for i in range(count)]


def distribution(model: Model, window: Sequence[int]) -> Logits:
    """Return log probabilities after each token but the last: fp32 [tokens - 1, vocabulary]."""
    pages = range(1, 1 + -(-len(window) // PAGE_SIZE))
    store = model.new_store(1 + len(pages), PAGE_SIZE)
    rows = len(window) - 1
    logits = model.run([Segment(window[:-1], 0, pages, rows, rows, key="it")], store).logits
    assert logits is not None  # every row wants them
    logits -= log_sum_exp(logits)
    return logits


def compare(exact: Logits, own: Logits, window: Sequence[int]) -> tuple[float, float, float]:
    """Return loss in nats, and divergence in nats from and agreement with ``exact``."""
    divergence = float((np.exp(exact) * (exact - own)).sum(-1).mean())
    same = exact.argmax(-1) == own.argmax(-1)
    return loss(own, window), divergence, float(same.mean())


def loss(own: Logits, window: Sequence[int]) -> float:
    """Return the mean loss in nats of the actual next tokens."""
    after = np.array(window[1:])[:, None]
    return -float(np.take_along_axis(own, after, -1).mean())


def interval(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Return the mean of the values, and its interval of ``CONFIDENCE``."""
    mean = fmean(values)
    wide = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * stdev(values) / len(values) ** 0.5
    return mean, (mean - wide, mean + wide)


def figures(
    name: str, bits: float, rows: Sequence[tuple[float, float, float]], exact: Sequence[float]
) -> dict[str, Any]:
    """Return one row of the report, from what ``compare`` and ``loss`` returned by window."""
    losses, divergences, agreements = zip(*rows, strict=True)
    nats, bounds = interval([a - b for a, b in zip(losses, exact, strict=True)])
    divergence, divergence_bounds = interval(divergences)
    agreement, agreement_bounds = interval(agreements)
    return {
        "quantization": name,
        "bits_per_weight": bits,
        "perplexity": math.exp(fmean(losses)),
        "perplexity_loss": math.expm1(nats),
        "perplexity_loss_interval": [math.expm1(bound) for bound in bounds],
        "agreement": agreement,
        "agreement_interval": list(agreement_bounds),
        "divergence": divergence,
        "divergence_interval": list(divergence_bounds),
    }


def quality(
    model: Folder, texts: Sequence[str], recipes: Sequence[str], windows: int,
    dtype: str = "bfloat16", kv_cache_dtype: str = "auto",
) -> dict[str, Any]:  # fmt: skip
    """Return a report on quantised weights beside the checkpoint's own in ``dtype``.

    ``recipes`` are what ``LLM(quantization=...)`` takes, or checkpoints with the same tokenizer. If
    the reference's weights are already quantised, its activations have 16 bits, so that comparing
    such a checkpoint with itself shows the cost of the default ``activations``. Its keys and values
    have ``dtype``; the others' have ``kv_cache_dtype``. ``perplexity_loss`` is the ratio to the
    reference's perplexity, less 1; ``agreement`` the share of positions with the same most likely
    next token; ``divergence`` the mean KL divergence, in nats. All models stay in memory. Raises
    OutriderError: a model cannot be loaded, a recipe is wrong, or there is too little text.
    """
    folder = find_folder(model)
    chosen = {
        name: (Path(name), None) if Path(name).exists() else (folder, Recipe.parse(name))
        for name in recipes
    }

    def open_model(where: Path, recipe: Recipe | None, **options: str) -> Model:
        few = None if recipe is None else str(recipe)
        options |= {"dtype": dtype}
        llm = LLM(where, drafter=None, quantization=few, max_num_seqs=1, **options)  # type: ignore[arg-type]
        return llm.engine.model

    reference = open_model(folder, None, activations="16")
    length = min(WINDOW_TOKENS, reference.shape.context)
    read = cut(texts, read_codec(folder), length, windows)
    models = {name: open_model(*of, kv_cache_dtype=kv_cache_dtype) for name, of in chosen.items()}
    rows: dict[str, list[tuple[float, float, float]]] = {name: [] for name in models}
    exact = []
    for window in tqdm(read, "reading", unit="window", leave=False, disable=None):
        expected = distribution(reference, window)
        exact.append(loss(expected, window))
        for name, model_rows in rows.items():
            model_rows.append(compare(expected, distribution(models[name], window), window))
    return {
        "model": str(model),
        "dtype": str(reference.dtype),
        "kv_cache_dtype": kv_cache_dtype,
        "bits_per_weight": bits_per_weight(folder, None),
        "perplexity": math.exp(fmean(exact)),
        "windows": len(read),
        "window": length,
        "intervals": {"confidence": CONFIDENCE, "method": METHOD},
        "runs": [
            figures(name, bits_per_weight(*chosen[name]), model_rows, exact)
            for name, model_rows in rows.items()
        ],
    }
