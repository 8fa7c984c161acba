"""The list of likely ids that a drafter draws from, which adapts to the texts.

A full pass reads the whole head, a row for each id, though few ids ever occur. As in Zhao et al.,
"FR-Spec: Accelerating large-vocabulary language models via frequency-ranked speculative sampling",
2025, drafts come from the rows of likely ids alone. Other ids are never drafted; the target still
chooses among all. Here no corpus is counted: ids are listed as they occur, and kept in the cache
folder for later starts.
"""

from __future__ import annotations

import hashlib
import json
import logging
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..base.homes import cache_home
from ..base.kept import read_kept, write_kept
from ..base.types import SequenceState
from ..checkpoints.architecture import Architecture
from ..models.kept_weights import written
from ..models.native_model import NativeModel
from .base import DrafterContext

SIZE = 32768
"""Ids on the list."""
LARGE = 2 * SIZE
"""Least ids of a vocabulary for which drafts come from a list."""
LEAST_SHARE = 0.2
"""Least share of a pass's weights that is the head's, for the same."""
WINDOW = 64
"""Tokens, about, over which the share of a text that is not on the list is averaged."""
MOST_MISSED = 0.05
"""Largest such share; above it drafts come from all ids."""
KEPT_AFTER = 64
"""New ids on the list after which it is saved."""
logger = logging.getLogger("outrider")


def pays(shape: Architecture) -> bool:
    """Return whether the head is so large a part of a pass that a list pays."""
    a = shape
    attention = a.head_dim * 2 * (a.num_heads + a.num_kv_heads)
    layers = a.num_layers * (attention + 3 * a.intermediate_size)
    return a.vocab_size >= LARGE and a.vocab_size >= LEAST_SHARE * (layers + a.vocab_size)


def ids_file(files: Iterable[Path]) -> Path:
    """Return where the likely ids of a drafter that comes from ``files`` are kept."""
    name = hashlib.sha256(json.dumps(written(files)).encode()).hexdigest()
    return cache_home() / "likely" / f"{name[:32]}.json"


def read_ids(file: Path, vocabulary: int, most: int) -> list[int]:
    """Return the ids that a file keeps; empty if they do not fit such a vocabulary."""
    try:
        kept: Any = read_kept(file)
        ids, whole = kept["ids"], kept["vocabulary"] == vocabulary
        plain = type(ids) is list and all(type(i) is int and 0 <= i < vocabulary for i in ids)
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError):
        plain = whole = False
    if not (plain and whole and len(ids) == len(set(ids)) <= most):
        logger.warning("%s keeps no list of likely ids; it is written anew.", file)
        return []
    return ids  # type: ignore[no-any-return]


def likely_ids(
    model: NativeModel, files: Iterable[Path], context: DrafterContext
) -> LikelyIds | None:
    """Return the list for drafts of a model read from ``files``; None if none pays."""
    if not pays(model.shape) or context.needs_logits:
        return None
    return LikelyIds(model, ids_file(files) if context.config.repack_cache else None)


class LikelyIds:
    """The list of a drafter's ``model``: ids by place, each with a copy of its row of the head.

    It begins with the ids in ``file`` (None: nothing is kept), end tokens, and the lowest ids, the
    most frequent ones in vocabularies of merges. An id that occurs and is not on it takes the place
    of one that has not occurred for long; among those that never did, the highest goes first.
    """

    def __init__(self, model: NativeModel, file: Path | None) -> None:
        shape, size = model.shape, SIZE
        self._model, self._file, self._size = model, file, size
        kept = [] if file is None else read_ids(file, shape.vocab_size, size)
        ends = [token for token in sorted(shape.eos_token_ids) if token < shape.vocab_size]
        self._ids = [*dict.fromkeys((*kept, *ends, *range(size)))][:size]
        self._places = array("i", [-1]) * shape.vocab_size
        for place, token in enumerate(self._ids):
            self._places[token] = place
        self._said = bytearray(size)
        self._said[: len(kept)] = bytes([1]) * len(kept)
        self._learned = set(kept)
        self._hand = self._new = 0
        self._texts: dict[str, tuple[int, float]] = {}
        """By sequence, how many tokens were read, and the recent share that was not on the list."""
        model.library.set_likely(model.handle, size, range(size), self._ids)
        model.likely = size

    def choose(self, sequences: Iterable[str]) -> None:
        """Let drafts of these sequences come from the list, or from all ids where it lacks many."""
        missed = max([self._texts[name][1] for name in sequences if name in self._texts], default=0)
        self._model.likely = self._size if missed <= MOST_MISSED else 0

    def learn(self, sequence: SequenceState) -> None:
        """Take in the tokens of a sequence since the last time, its prompt among them."""
        count, missed = self._texts.get(sequence.id, (0, 0.0))
        changed: dict[int, int] = {}
        places, said = self._places, self._said
        for token in sequence.tokens[count:]:
            if token >= len(places):
                continue  # the target's vocabulary is larger
            place = places[token]
            missed += ((place < 0) - missed) / WINDOW
            if place < 0:
                place = self._free_place()
                places[self._ids[place]], places[token] = -1, place
                self._learned.discard(self._ids[place])
                self._learned.add(token)
                self._ids[place] = changed[place] = token
                self._new += 1
            said[place] = 1
        self._texts[sequence.id] = len(sequence.tokens), missed
        if changed:
            model = self._model
            model.library.set_likely(model.handle, self._size, [*changed], [*changed.values()])
            self._keep()

    def release(self, seq_id: str) -> None:
        """Forget a sequence."""
        self._texts.pop(seq_id, None)

    def _free_place(self) -> int:
        """Return the next place, from the last down, whose id has not occurred for a round."""
        said = self._said
        while True:
            self._hand = (self._hand or self._size) - 1
            if not said[self._hand]:
                return self._hand
            said[self._hand] = 0

    def _keep(self) -> None:
        if self._file is None or self._new < KEPT_AFTER:
            return
        self._new = 0
        kept = {"vocabulary": len(self._places), "ids": sorted(self._learned)}
        try:
            write_kept(self._file, kept)
        except OSError as error:
            logger.info("likely ids are not kept (%s)", error)
            self._file = None
