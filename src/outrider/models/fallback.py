"""Any other model that transformers loads, behind the same protocol: slower, and as exact.

Positions are cut into spans of ``PROMPT_SPAN`` as far as the prompt fills them and of ``TILE`` from
there on. Every forward runs one whole span of one sequence over a cache that ends where the span
begins, padded after the last row. So a row's logits are the same bits however the work is cut up.
"""

import inspect
import logging
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..base.fields import one_line
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.claims import check_model
from ..checkpoints.configs import PlainConfig
from ..checkpoints.dtypes import choose_dtype
from ..checkpoints.formats.shared import REMEDY
from ..checkpoints.rope import BY_LENGTH
from ..errors import ModelError
from .base import Output, Store
from .python_step import PythonStep
from .rows import Segment
from .tensors import as_array, torch_dtype
from .tiles import TILE, padded

logger = logging.getLogger("outrider")

PROMPT_SPAN = 64
"""Rows of a prompt that run together: few enough to repeat if a chunk ends in between."""
CACHES = ("past_key_values", "cache_params", "state")
"""Names under one of which a model returns its cache, and takes it again."""
CROPPED = ("DynamicLayer", "DynamicIndexedLayer", "DummyLayer")
"""transformers' cache layers that can be cropped; those with windows are replaced by the first."""
PRODUCTS = (F.linear, torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.__matmul__)


class FixedProducts(TorchFunctionMode):
    """Runs products of any number of rows, as experts have them, in tiles of ``TILE``.

    How many of a span's rows an expert gets depends on later rows, which must not matter.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in PRODUCTS and args[0].dim() == args[1].dim() == 2 and len(args[0]) != TILE:
            x, *rest = args
            wide = F.pad(x, (0, 0, 0, padded(len(x), TILE) - len(x)))
            return torch.cat([func(tile, *rest, **kwargs) for tile in wide.split(TILE)])[: len(x)]
        return func(*args, **kwargs)


@dataclass
class KeptSequence:
    """One sequence: its ``tokens`` so far, and what the model keeps of some or all of them.

    ``states`` [rows, width] went into the output matrix in the last call, for the rows that wanted
    logits, from row ``first`` on; None unless the model ``keeps_states``.
    """

    tokens: list[int] = field(default_factory=list)
    cache: Any = None
    states: torch.Tensor | None = None
    first: int = 0

    def state(self, row: int) -> torch.Tensor | None:
        """Return a row's state [1, width]; None if it is not kept."""
        if self.states is None or not self.first <= row < self.first + len(self.states):
            return None
        return self.states[row - self.first, None]


class SequenceStore(Store):
    """Caches by ``Segment.key``: a store whose pages are only counted."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.kept = defaultdict[str, KeptSequence](KeptSequence)

    def release(self, key: str) -> None:
        """Free the cache of ``key`` at once."""
        self.kept.pop(key, None)


class Fallback(PythonStep):
    """A checkpoint run by transformers.

    Chains only, one sequence a forward. A model whose state cannot be rolled back (Mamba, RWKV,
    hybrids) has ``truncates`` False and runs row by row. A model that takes no cache, or keeps a
    part of its state elsewhere, computes its sequence anew for every span or row. A model whose
    rows depend on later ones is refused.
    """

    trees = False
    paged = False
    keeps_states = False
    """True if sequences keep the states of their last rows, for a drafter."""

    def __init__(self, checkpoint: Checkpoint, dtype: str, device: str) -> None:
        self.shape, folder, config = checkpoint.shape, checkpoint.folder, checkpoint.config
        if checkpoint.quantised:
            raise ModelError(
                f"{folder}: quantised weights and GGUF files are read for native families only, "
                f"and {config.model_type!r}, as configured, is none; {REMEDY}."
            )
        self.dtype = choose_dtype(dtype, self.shape.dtype)
        self.device = device
        self._model = _load(checkpoint, torch_dtype(self.dtype)).to(device).eval()
        takes = inspect.signature(self._model.forward).parameters
        self._name = next((name for name in CACHES if name in takes), None)
        self._skips_logits = "logits_to_keep" in takes
        self._experts = any("expert" in name for name, _ in self._model.named_modules())
        self._length = 0
        self._tie_ropes()
        stateful = bool(getattr(self._model, "_is_stateful", False))
        self.truncates = not stateful and (self._name is None or self._new_cache() is not None)
        with torch.inference_mode():
            self._try(folder)
            self._page = self._measure()

    @property
    def config(self) -> Any:
        """The model's config, as transformers has it."""
        return self._model.config

    @property
    def decoder(self) -> Any:
        """The layers of transformers' model, with its embedding."""
        return self._model.get_decoder()

    def _span_at(self, row: int, prompt_length: int) -> tuple[int, int]:
        """Return the first position of the span of ``row``, and the one after its last."""
        for size in (PROMPT_SPAN, TILE):
            begin = row // size * size
            if self.truncates and (size == TILE or begin + size <= prompt_length):
                return begin, max(row + 1, min(begin + size, self.shape.context))
        return row, row + 1

    def _new_cache(self) -> DynamicCache | None:
        """Return an empty cache that can be cropped; None if the model's cannot be."""
        cache = DynamicCache(config=self._model.config)
        cache.layers = [
            # A window that dropped its past could not go back; the mask alone makes the window.
            DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer
            for layer in cache.layers
        ]
        return cache if all(type(layer).__name__ in CROPPED for layer in cache.layers) else None

    def _tie_ropes(self) -> None:
        """Make ropes that scale with the sequence's length use it, and forget earlier lengths.

        As in the native step it is the prompt's, and beyond the prompt the end of the row's span.
        """

        def lengthen(rope: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            named = "position_ids" in kwargs
            positions = kwargs.pop("position_ids") if named else args[1]
            rest = args[1:] if named else args[2:]
            one = torch.zeros_like(positions[..., :1])
            rope.forward(args[0], one, *rest, **kwargs)
            return (args[0], torch.cat((positions, one + self._length - 1), -1), *rest), kwargs

        def shorten(rope: Any, args: Any, out: Any) -> Any:
            if isinstance(out, torch.Tensor):
                return out[..., :-1, :]
            return tuple(table[..., :-1, :] for table in out)

        for module in self._model.modules():
            kinds = getattr(module, "rope_type", None)
            kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
            if any(kind in BY_LENGTH for kind in kinds):
                module.register_forward_pre_hook(lengthen, with_kwargs=True)
                module.register_forward_hook(shorten)

    def _try(self, folder: Path) -> None:
        """Find out from a few forwards whether a row depends on what it must not depend on."""
        what = f"{folder}: this {self.shape.family!r} model"

        def logits(tokens: list[int]) -> torch.Tensor:
            return self._rows(KeptSequence(), Segment(tokens, 0, (), len(tokens), len(tokens)))

        try:
            some = logits([1, 2, 3, 1])
        except Exception as error:
            raise ModelError(
                f"{what} loads, but transformers cannot run it on a few tokens "
                f"({type(error).__name__}: {one_line(error)}); it cannot be served."
            ) from error
        if not self.truncates:
            kept, other = KeptSequence(), KeptSequence()
            for row, token in enumerate((1, 2, 3, 1)):
                last = self._rows(kept, Segment([token], row, (), 1, 4))
                self._rows(other, Segment([4], row, (), 1, 4))
            if kept.cache is None or not torch.equal(last[-1], some[-1]):
                self._name = None  # a part of its state is kept elsewhere, shared by all
            return
        whole = logits(list(range(1, TILE + 1)))
        # Well beyond rounding, which is all that another kernel may change.
        far = (0.001 if self.dtype == np.float32 else 0.05) * float(whole.std())
        for count in range(1, TILE):
            part = logits(list(range(1, count + 1)))
            if not torch.allclose(part, whole[:count], rtol=0, atol=far, equal_nan=True):
                raise ModelError(f"{what} lets rows depend on later ones; it cannot be decoded.")
            if not torch.equal(part, whole[:count]):
                self.truncates = False  # whatever the reason, a row by itself is always the same
                return

    def _measure(self) -> tuple[int, int]:
        """Return a sequence's fixed bytes of cache, and the bytes of each token."""
        kept, size = KeptSequence(), []
        for start in (0, TILE):
            self._rows(kept, Segment([1] * TILE, start, (), 1, 2 * TILE))
            size.append(_num_bytes(kept.cache))
        each = -(-(size[1] - size[0]) // TILE)
        return max(0, size[0] - each * TILE), each

    def page_bytes(self, page_size: int) -> int:
        """Return the most bytes of a page's tokens: a state of fixed size counts for every page."""
        fixed, each = self._page
        return fixed + (each + 8) * page_size  # 8: the token itself

    def new_store(self, num_pages: int, page_size: int) -> SequenceStore:
        """Return an empty cache; it grows and shrinks with its sequences."""
        return SequenceStore(page_size)

    @torch.inference_mode()
    def run(self, segments: Sequence[Segment], store: Store, hidden: Sequence[int] = ()) -> Output:
        """See ``base.Model``; nodes must be chains, and there are no hidden states."""
        assert isinstance(store, SequenceStore)
        assert not hidden
        logits = torch.cat([self._rows(store.kept[s.key], s) for s in segments])
        return Output(as_array(logits) if len(logits) else None)

    def _rows(self, kept: KeptSequence, segment: Segment) -> torch.Tensor:
        """Run a segment's rows; fp32 logits [segment.logits, vocabulary]."""
        if list(segment.parents) != list(range(-1, len(segment.nodes) - 1)):
            raise RuntimeError("this model verifies chains only, and was given a tree")
        start, prompt = segment.start, segment.prompt_length
        if start > len(kept.tokens) or (not self.truncates and start != len(kept.tokens)):
            raise RuntimeError(f"row {start} follows {len(kept.tokens)} rows in the cache")
        kept.tokens = [*kept.tokens[:start], *segment.tokens, *segment.nodes]
        first = len(kept.tokens) - segment.logits
        parts = [torch.empty(0, self.shape.vocab_size, device=self.device)]
        said: list[torch.Tensor] = []
        row = start
        while row < len(kept.tokens):
            begin, stop = self._span_at(row, prompt)
            row = min(stop, len(kept.tokens))
            self._length = max(prompt, stop)
            wanted = max(0, row - max(begin, first))
            logits, states = self._span(kept, begin, row, stop, wanted > 0)
            logits = logits[: row - begin]
            if states is not None:
                said.append(states[row - begin - wanted : row - begin].clone())
            if self.truncates and wanted and logits.isnan().any():
                # A masked row with NaN still spreads, as 0 * NaN is NaN: leave out later rows.
                ends = range(begin + 1, row + 1)
                alone = [self._span(kept, begin, end, stop, True)[0] for end in ends]
                logits = torch.stack([rows[i] for i, rows in enumerate(alone)])
            parts.append(logits[len(logits) - wanted :])
        kept.states, kept.first = torch.cat(said) if said else None, first
        return torch.cat(parts)

    def _span(
        self, kept: KeptSequence, begin: int, end: int, stop: int, wanted: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the rows from ``begin`` to ``end``, padded to ``stop``.

        Returns:
            Logits, fp32 [rows, vocabulary], and states if they are kept; padding rows, and all
            unless ``wanted``, have no meaning.
        """
        rows = kept.tokens[begin:end] + [kept.tokens[end - 1]] * (stop - end)
        options: dict[str, Any] = {"use_cache": self._name is not None}
        if self._name is None:
            rows = kept.tokens[:begin] + rows
        elif self.truncates:
            kept.cache = kept.cache or self._new_cache()
            if (beyond := kept.cache.get_seq_length() - begin) > 0:
                kept.cache.crop(-beyond)
            options[self._name] = kept.cache
        elif kept.cache is not None:
            options[self._name] = kept.cache
        if self._skips_logits and not wanted:
            options["logits_to_keep"] = 1
        keeps = self.keeps_states and wanted
        if keeps:
            options["output_hidden_states"] = True
        with FixedProducts() if self._experts and self.truncates else nullcontext():
            out = self._model(torch.tensor([rows], device=self.device), **options)
        if self._name is not None:
            kept.cache = getattr(out, self._name, None)
        logits: torch.Tensor = out.logits[0].float()
        if self._name is None and wanted:
            logits = logits[begin:]
        return logits, out.hidden_states[-1][0] if keeps else None


def _load(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    """Return transformers' model, from safetensors, without any code of the checkpoint's."""
    folder, config = checkpoint.folder, checkpoint.config
    assert not isinstance(config, PlainConfig)
    check_model(config, checkpoint.tensors.shapes(), folder)
    try:
        config._experts_implementation = "eager"  # expert by expert, see ``FixedProducts``
        load: Any = AutoModelForCausalLM.from_pretrained
        model, report = load(
            folder, config=config, dtype=dtype, trust_remote_code=False, use_safetensors=True,
            local_files_only=True, output_loading_info=True,
        )  # fmt: skip
    except Exception as error:  # of whatever kind the model's own code raises
        said = one_line(error)
        if "ignore_mismatched_sizes" in said:
            said = "its tensors have other shapes than its config.json says"
        raise ModelError(f"{folder}: transformers cannot load it: {said}.") from error
    if missing := sorted(report["missing_keys"]):
        raise ModelError(f"{folder} has no tensor {missing[0]!r}; its config.json promises one.")
    logger.info(
        "%s: %r has no native path and runs through transformers, which is slower.",
        folder,
        model.config.model_type,
    )
    return model


def _num_bytes(kept: Any) -> int:
    """Return the bytes of all tensors in ``kept``, however they are nested."""
    if isinstance(kept, torch.Tensor):
        return kept.nbytes
    if isinstance(kept, dict):
        return sum(map(_num_bytes, kept.values()))
    if isinstance(kept, list | tuple):
        return sum(map(_num_bytes, kept))
    return _num_bytes(vars(kept)) if hasattr(kept, "__dict__") and not callable(kept) else 0
