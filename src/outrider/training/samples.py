"""Samples to train on: token ids and loss masks, in shards with checksums.

A data folder has ``data.json`` and shards of safetensors. A shard is written whole or not at all,
and listed once it is written, so that an interrupted run goes on behind the last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from ..base.fields import Fields, read_object, readable
from ..base.kept import part_of, write_kept
from ..base.limits import LARGEST_CONTEXT
from ..checkpoints.files import read_header, save_file
from ..errors import ConfigError, ModelError

VERSION = 1
MANIFEST, CONFIG = "data.json", "config.json"
"""What a data folder has, and what a checkpoint has."""
HELD_OUT = 20
"""About one prompt in so many is held out."""
HOTTEST = 100.0
"""The highest temperature."""
COLUMNS = {"offsets": np.int64, "tokens": np.int32, "said": np.bool_, "prompts": np.int64}
"""The tensors of a shard; sample i has the tokens from its offset up to the next one."""
ANEW = "write the data again in a new folder"


class Sample(NamedTuple):
    """Token ids int32 [n], and the loss mask: for each id whether the target ``said`` it.

    ``prompt`` is the number of the prompt that it began with.
    """

    tokens: NDArray[np.int32]
    said: NDArray[np.bool_]
    prompt: int

    @property
    def is_held_out(self) -> bool:
        """True for about one prompt in ``HELD_OUT``, by its number alone."""
        return crc32(str(self.prompt).encode()) % HELD_OUT == 0


class Shard(NamedTuple):
    """A file of samples: its name, the SHA-256 of its bytes, and what it holds.

    Its samples are of the prompts from ``first`` up to ``stop``.
    """

    file: str
    sha256: str
    first: int
    stop: int
    samples: int
    tokens: int
    said: int


@dataclass(frozen=True)
class About:
    """The source of samples, and their options; a folder goes on only with the same."""

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
        with part_of(self.folder / name) as part:
            save_file(columns, part, {"format": "np"})
            digest = sha256(part.read_bytes()).hexdigest()
        count, said = int(lengths.sum()), int(columns["said"].sum())
        self._samples = None
        self.shards.append(Shard(name, digest, first, stop, len(samples), count, said))
        write_kept(
            self.folder / MANIFEST,
            {
                "version": VERSION,
                "about": vars(self.about),
                "shards": [each._asdict() for each in self.shards],
            },
        )

    def read(self) -> Samples:
        """Return all samples, which are read once.

        Raises ConfigError: a shard is missing or its checksum differs, or there are no samples.
        """
        if self._samples is None:
            self._samples = self._read()
        return self._samples

    def _read(self) -> Samples:
        samples: list[Sample] = []
        for shard in self.shards:
            file = self.folder / shard.file
            try:  # of a pipe nothing is read: it may never end
                same = file.is_file() and sha256(file.read_bytes()).hexdigest() == shard.sha256
            except OSError:
                same = False
            if not same:
                raise ConfigError(f"{file} is missing or was changed; {ANEW}.")
            with readable(f"{file} is damaged", f"{ANEW}."):
                samples += self._samples_in(file)
        if not samples:
            raise ConfigError(f"{self.folder} holds no samples; write some first.")
        return Samples(samples)

    def _samples_in(self, file: Path) -> list[Sample]:
        """Return the samples in a shard. Raises ValueError, LookupError: it is of another form."""
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
        spans = zip(offsets[:-1], offsets[1:], prompts.tolist(), strict=True)
        return [Sample(tokens[a:b], said[a:b], prompt) for a, b, prompt in spans]


def check_out(out: Path, begun: str, others: Sequence[str]) -> None:
    """Raise ConfigError: a folder to write is a file, or has ``others`` before it was ``begun``.

    So a target, a head or data that ``out`` names by mistake stays as it is.
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
    counts = (values.whole(n, 0) for n in ("first", "stop", "samples", "tokens", "said"))
    return Shard(name, values.text("sha256"), *counts)


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
        """Return the samples with only the first ``share`` of those to train on."""
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
