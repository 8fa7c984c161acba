"""Samples to train on: token ids and loss masks, in shards with checksums.

A data folder has ``data.json`` and shards of safetensors. A shard is written whole or not at all,
and listed once it is written, so that an interrupted run resumes after the last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from ..base.fields import Fields, read_object, readable
from ..base.kept import part_of, write_kept
from ..base.limits import LARGEST_CONTEXT
from ..checkpoints.dtypes import Array
from ..checkpoints.files import Entry, read_header, save_file
from ..errors import ConfigError, ModelError
from .states import HIDDEN, KNOWN, TYPES, States, StoredStates

VERSION = 1
MANIFEST, CONFIG = "data.json", "config.json"
"""The files that mark a data folder and a checkpoint."""
HELD_OUT = 20
"""About one prompt in this many is held out."""
HOTTEST = 100.0
"""The highest temperature."""
COLUMNS = {"offsets": np.int64, "tokens": np.int32, "said": np.bool_, "prompts": np.int64}
"""The tensors of a shard; sample i has the tokens from its offset up to the next one."""
ANEW = "write the data again in a new folder"


class Sample(NamedTuple):
    """Token ids int32 [n], and the loss mask: for each id whether the target ``said`` it.

    ``prompt`` is the number of the prompt that it began with. ``states`` are the target's, if they
    were kept.
    """

    tokens: NDArray[np.int32]
    said: NDArray[np.bool_]
    prompt: int
    states: States | None = None

    @property
    def is_held_out(self) -> bool:
        """True for about one prompt in ``HELD_OUT``, by its number alone."""
        return crc32(str(self.prompt).encode()) % HELD_OUT == 0


class StatesFile(NamedTuple):
    """A file of the target's states after a layer: the SHA-256 of its bytes."""

    layer: int
    sha256: str


class Shard(NamedTuple):
    """A file of samples: its name, the SHA-256 of its bytes, and what it holds.

    Its samples are of the prompts from ``first`` up to ``stop``. The target's ``states`` along them
    are in one file for each layer.
    """

    file: str
    sha256: str
    first: int
    stop: int
    samples: int
    tokens: int
    said: int
    states: tuple[StatesFile, ...] = ()

    def states_file(self, layer: int) -> str:
        """Return the name of the file with the states after a layer."""
        return f"states-{layer}-{self.file}"


@dataclass(frozen=True)
class About:
    """The source and options of samples; a folder is resumed only with the same."""

    target: str
    vocab_size: int
    prompts: str
    num_prompts: int
    temperatures: tuple[float, ...]
    max_tokens: int
    context: int
    seed: int

    def differs(self, other: About) -> list[str]:
        """Return a text for each difference."""
        return [
            f"{name} is {theirs!r}, not {own!r}"
            for name, own in vars(self).items()
            if (theirs := getattr(other, name)) != own
        ]


class DataFolder:
    """A folder of samples, which may still be written to."""

    def __init__(self, folder: Path, about: About, shards: Sequence[Shard]) -> None:
        self.folder, self.about, self.shards = folder, about, [*shards]
        self._samples: Samples | None = None
        self._have_states = False
        """True if the samples were read with their states."""

    @classmethod
    def opened(cls, folder: Path) -> DataFolder:
        """Return the data in a folder. Raises ConfigError: there is none, or it is damaged."""
        file = folder / MANIFEST
        if not file.is_file():
            raise ConfigError(
                f"{folder} has no {MANIFEST}; write data there with outrider train data."
            )
        try:
            values = Fields(read_object(file, ANEW), str(file))
            if values.whole("version") != VERSION:
                raise values.refuse("version", f"{VERSION}; write the data again")
            about = values.section("about")
            listed = tuple(about.listed("temperatures", float))
            if not listed or not all(0 <= heat <= HOTTEST for heat in listed):  # false for NaN
                raise about.refuse("temperatures", f"a list of numbers from 0 to {HOTTEST:g}")
            return cls(
                folder,
                About(
                    about.text("target"), about.whole("vocab_size", 1), about.text("prompts"),
                    about.whole("num_prompts", 1), listed, about.whole("max_tokens", 1),
                    about.whole("context", 2, LARGEST_CONTEXT), about.whole("seed"),
                ),
                [_shard(Fields(each, f"{file}: shards")) for each in values.listed("shards", dict)],
            )  # fmt: skip
        except ModelError as error:
            raise ConfigError(str(error)) from None

    @property
    def done(self) -> int:
        """The number of prompts whose samples are written."""
        return self.shards[-1].stop if self.shards else 0

    def add(self, samples: Sequence[Sample], first: int, stop: int) -> None:
        """Write a shard of the prompts from ``first`` up to ``stop``. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"samples-{len(self.shards):05}.safetensors"
        lengths = np.array([0, *(len(each.tokens) for each in samples)], np.int64)
        columns = {
            "offsets": np.cumsum(lengths),
            "tokens": np.concatenate([np.empty(0, np.int32), *(s.tokens for s in samples)]),
            "said": np.concatenate([np.empty(0, np.bool_), *(s.said for s in samples)]),
            "prompts": np.array([s.prompt for s in samples], np.int64),
        }
        count, said = int(lengths.sum()), int(columns["said"].sum())
        digest = self._save(name, columns)
        shard = Shard(name, digest, first, stop, len(samples), count, said)
        layers = next((s.states.layers for s in samples if s.states is not None), ())
        states = tuple(
            StatesFile(layer, self._save(shard.states_file(layer), _states_columns(samples, layer)))
            for layer in layers
        )
        self._samples = None
        self.shards.append(shard._replace(states=states))
        write_kept(
            self.folder / MANIFEST,
            {
                "version": VERSION,
                "about": vars(self.about),
                "shards": [
                    {**each._asdict(), "states": [s._asdict() for s in each.states]}
                    for each in self.shards
                ],
            },
        )

    def _save(self, name: str, tensors: dict[str, Array]) -> str:
        """Write a file of the folder; return its SHA-256."""
        with part_of(self.folder / name) as part:
            save_file(tensors, part, {"format": "np"})
            return _digest(part)

    def read(self, states: bool = False) -> Samples:
        """Return all samples, reading them once, with the target's ``states`` if they are wanted.

        Raises ConfigError: a shard is missing or its checksum differs, or there are no samples.
        """
        if self._samples is None or (states and not self._have_states):
            self._samples, self._have_states = self._read(states), states
        return self._samples

    def _read(self, with_states: bool) -> Samples:
        samples: list[Sample] = []
        for shard in self.shards:
            file, states = self._checked(shard.file, shard.sha256), dict[int, Path]()
            for layer, digest in shard.states if with_states else ():
                states[layer] = self._checked(shard.states_file(layer), digest)
            with readable(f"{file} is damaged", f"{ANEW}."):
                samples += self._samples_in(file, states)
        if not samples:
            raise ConfigError(f"{self.folder} holds no samples; write some first.")
        return Samples(samples)

    def _checked(self, name: str, digest: str) -> Path:
        """Return a file of the folder. Raises ConfigError: it is missing or was changed."""
        file = self.folder / name
        try:  # a pipe is not read: it may never end
            same = file.is_file() and _digest(file) == digest
        except OSError:
            same = False
        if not same:
            raise ConfigError(f"{file} is missing or was changed; {ANEW}.")
        return file

    def _samples_in(self, file: Path, states: Mapping[int, Path]) -> list[Sample]:
        """Return the samples in a shard. Raises ValueError, LookupError: it is malformed."""
        found = read_header(file)
        columns = [found[name].read() for name in COLUMNS]
        offsets, tokens, said, prompts = columns
        lengths = np.diff(offsets)
        if (
            [(each.dtype.type, each.ndim) for each in columns] != [(t, 1) for t in COLUMNS.values()]
            or offsets[0] != 0
            or not offsets[-1] == len(tokens) == len(said)
            or len(prompts) != len(lengths)
            or ((lengths < 1) | (lengths > self.about.context) | (prompts < 0)).any()
            or ((tokens < 0) | (tokens >= self.about.vocab_size)).any()
            or said[offsets[:-1]].any()  # without a prompt before it
        ):
            raise ValueError("its samples are out of range")
        kept, known = _stored(states, len(prompts), len(tokens))
        spans = zip(offsets[:-1].tolist(), offsets[1:].tolist(), prompts.tolist(), strict=True)
        return [
            Sample(tokens[a:b], said[a:b], prompt, StoredStates(kept, a) if known[i] else None)
            for i, (a, b, prompt) in enumerate(spans)
        ]


def _stored(
    files: Mapping[int, Path], samples: int, tokens: int
) -> tuple[dict[int, Entry], Sequence[bool]]:
    """Return the states in the files of a shard, by layer, and which samples have them.

    Raises ValueError, LookupError: they are malformed.
    """
    found = {layer: read_header(file) for layer, file in files.items()}
    known: Sequence[bool] = [False] * samples
    for each in found.values():
        hidden, mask = each[HIDDEN], each[KNOWN].read()
        if (
            hidden.type not in TYPES
            or (len(hidden.shape), hidden.shape[0]) != (2, tokens)
            or mask.shape != (samples,)
            or mask.dtype != np.bool_
        ):
            raise ValueError("its states are of another form")
        known = mask.tolist()
    return {layer: each[HIDDEN] for layer, each in found.items()}, known


def _states_columns(samples: Sequence[Sample], layer: int) -> dict[str, Array]:
    """Return the tensors of a file of states; samples without any have zeros."""
    rows = [None if s.states is None else s.states.read(layer, len(s.tokens)) for s in samples]
    known = [each is not None for each in rows]
    one = next(each for each in rows if each is not None)[:1]
    whole = [
        np.zeros_like(one, shape=(len(sample.tokens), one.shape[1])) if each is None else each
        for sample, each in zip(samples, rows, strict=True)
    ]
    return {HIDDEN: np.concatenate(whole), KNOWN: np.array(known, np.bool_)}


def _digest(file: Path) -> str:
    """Return the SHA-256 of a file."""
    with file.open("rb") as opened:
        return file_digest(opened, "sha256").hexdigest()


def check_out(out: Path, begun: str, others: Sequence[str]) -> None:
    """Raise ConfigError if ``out`` is a file, or has one of ``others`` but not ``begun``.

    This protects a target, a head or data that ``out`` names by mistake.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is no folder; give a new one.")
    found = [name for name in others if (out / name).exists()]
    if found and not (out / begun).exists():
        raise ConfigError(f"{out} has a {found[0]} of something else; give a new folder.")


def _shard(values: Fields) -> Shard:
    name = values.text("file")
    if Path(name).name != name:
        raise values.refuse("file", "the name of a file in the same folder")
    first, stop, samples, tokens, said = (
        values.whole(n, 0) for n in ("first", "stop", "samples", "tokens", "said")
    )
    kept = [Fields(each, f"{values.where}: states") for each in values.listed("states", dict)]
    states = tuple(StatesFile(each.whole("layer", -1), each.text("sha256")) for each in kept)
    return Shard(name, values.text("sha256"), first, stop, samples, tokens, said, states)


class Samples:
    """Samples in the order of their prompts, those to train on and those that are held out."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.train = [sample for sample in samples if not sample.is_held_out]
        self.held_out = [sample for sample in samples if sample.is_held_out]

    @property
    def said(self) -> int:
        """The number of tokens to learn from."""
        return sum(int(sample.said.sum()) for sample in self.train)

    def share(self, share: float) -> Samples:
        """Return the first ``share`` of the samples to train on, and all held-out ones."""
        kept = self.train[: max(1, round(share * len(self.train)))]
        return Samples([*kept, *self.held_out])

    def epoch(self, seed: int, number: int) -> list[Sample]:
        """Return the samples to train on in the order of an epoch."""
        order = np.random.default_rng((seed, number)).permutation(len(self.train))
        return [self.train[i] for i in order]

    def counts(self, vocab_size: int) -> NDArray[np.int64]:
        """Return how often the target said each id in the samples to train on."""
        said = [sample.tokens[sample.said] for sample in self.train]
        counted: NDArray[np.int64] = np.bincount(
            np.concatenate([np.empty(0, np.int32), *said]), minlength=vocab_size
        )
        return counted


def batches(samples: Sequence[Sample], tokens: int) -> Iterator[list[Sample]]:
    """Yield batches of whole samples with ``tokens`` or more tokens that the target said."""
    batch: list[Sample] = []
    count = 0
    for sample in samples:
        batch.append(sample)
        count += int(sample.said.sum())
        if count >= tokens:
            yield batch
            batch, count = [], 0
    if batch:
        yield batch
