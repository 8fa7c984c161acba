"""A page of ``/metrics`` in Prometheus' text format: samples, sums, growth since another page."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from math import inf, isfinite
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from ...base.outside.documents import MIB
from ...base.outside.http import call

LARGEST_PAGE = 16 * MIB
COUNTED = re.compile(r"_(total|sum|count|bucket)$")
NAME = re.compile(rb"[A-Za-z_:][A-Za-z0-9_:]*")
MOST_SAMPLES = 20_000
"""Most samples, and most broken lines, that are read from a page; engines have a few hundred
samples. Later lines count as broken."""
LONGEST_LINE_BYTES = 1 << 14
UNUSED = re.compile(r"_(bucket|created)$")


class Page:
    """The finite samples of one page, and how many of its lines are ``broken``."""

    def __init__(self, samples: Iterable[Sample], broken: int = 0) -> None:
        self.samples: dict[str, list[Sample]] = {}
        self.broken = broken
        for sample in samples:
            if isfinite(sample.value):
                name = sample.name.removesuffix("_total")
                self.samples.setdefault(name, []).append(sample)

    def since(self, before: Page) -> Page:
        """Return the counts since an earlier page, or since a restart; gauges are those of now."""
        counted = before.counted()
        grown = ((each, each.value - counted.get(_key(each), inf)) for each in self.all())
        samples = [each._replace(value=more) if more >= 0 else each for each, more in grown]
        return Page(samples, self.broken)

    def counted(self) -> dict[tuple[object, ...], float]:
        """Return the values of counters and histograms by their name and labels."""
        return {_key(each): each.value for each in self.all() if COUNTED.search(each.name)}

    def all(self) -> Iterator[Sample]:
        """Yield every sample."""
        for samples in self.samples.values():
            yield from samples

    def lines(self) -> list[str]:
        """Return the samples that facts need as lines of a page."""
        return [_line(sample) for sample in self.all() if not UNUSED.search(sample.name)]

    def restarted(self, before: Page) -> bool:
        """Return whether a counter is lower than on an earlier page, as after a restart."""
        counted = self.counted()
        return any(counted.get(key, inf) < value for key, value in before.counted().items())

    def total(self, name: str) -> float | None:
        """Return a metric's sum over its labels; None if it is missing or infinite."""
        samples = self.samples.get(name)
        total = sum(sample.value for sample in samples) if samples else inf
        return total if isfinite(total) else None

    def mean(self, name: str) -> float | None:
        """Return a metric's mean over its labels, or a histogram's mean; None if there is none."""
        count = self.total(f"{name}_count")
        if count is not None:
            total = self.total(f"{name}_sum")
            return total / count if total is not None and count > 0 else None
        samples = self.samples.get(name)
        return sum(sample.value for sample in samples) / len(samples) if samples else None

    def by_label(self, name: str, *labels: str) -> dict[str, float]:
        """Return a metric's sums by the value of the first of ``labels`` that it has."""
        sums: dict[str, float] = {}
        for sample in self.samples.get(name, ()):
            if label := next((each for each in labels if each in sample.labels), None):
                key = sample.labels[label]
                sums[key] = sums.get(key, 0.0) + sample.value
        return sums

    def buckets(self, name: str) -> dict[float, float]:
        """Return a histogram's cumulative counts by upper bound, summed over other labels."""
        sums: dict[float, float] = {}
        for sample in self.samples.get(f"{name}_bucket", ()):
            try:
                bound = float(sample.labels.get("le", ""))
            except ValueError:
                continue
            sums[bound] = sums.get(bound, 0.0) + sample.value
        return dict(sorted(sums.items()))

    def quantile(self, name: str, share: float) -> float | None:
        """Return a histogram's quantile as Prometheus' ``histogram_quantile`` does; None if empty.

        A quantile beyond the last finite bound is returned as that bound, which it exceeds.
        """
        counts = self.buckets(name)
        finite = [bound for bound in counts if isfinite(bound)]
        total = max(counts.values(), default=0.0)
        if not finite or total <= 0:
            return None
        lower, below = 0.0, 0.0
        for bound in finite:
            if counts[bound] >= share * total:
                width = counts[bound] - below
                within = (share * total - below) / width if width > 0 else 1.0
                return lower + (bound - lower) * within
            lower, below = bound, max(below, counts[bound])
        return finite[-1]


def _key(sample: Sample) -> tuple[object, ...]:
    return sample.name, *sorted(sample.labels.items())


def _line(sample: Sample) -> str:
    escaped = {name: json.dumps(text, ensure_ascii=False) for name, text in sample.labels.items()}
    labels = ",".join(f"{name}={text}" for name, text in escaped.items())
    return f"{sample.name}{{{labels}}} {sample.value!r}"


class Reader:
    """Parses a page in parts as they arrive; keeps the samples of ``names``, or all if None."""

    def __init__(self, names: Collection[str] | None = None) -> None:
        self._names = names
        self._samples: list[Sample] = []
        self._broken = 0
        self._rest = b""

    def feed(self, part: bytes) -> None:
        """Parse the page's next bytes; a line that is too long counts as broken."""
        *lines, rest = (self._rest + part).split(b"\n")
        for line in lines:
            self._take(line)
        # An overlong line counts as broken once; the rest of it is skipped.
        self._rest = rest[: LONGEST_LINE_BYTES + 1]

    def page(self) -> Page:
        """Return the page, once all of it was fed."""
        self._take(self._rest)
        self._rest = b""
        return Page(self._samples, self._broken)

    def _take(self, line: bytes) -> None:
        if line.startswith(b"#") or not line.strip():
            return
        if not self._wanted(line):
            return
        full = max(len(self._samples), self._broken) >= MOST_SAMPLES
        if len(line) > LONGEST_LINE_BYTES or full:
            self._broken += 1
            return
        try:
            text = line.decode("utf-8", "replace")
            for family in text_string_to_metric_families(text + "\n"):
                self._samples += [each._replace(value=float(each.value)) for each in family.samples]
        except (ValueError, IndexError, KeyError, TypeError, OverflowError):
            self._broken += 1

    def _wanted(self, line: bytes) -> bool:
        if self._names is None:
            return True
        match = NAME.match(line)
        if match is None:  # broken, or an unknown name
            return False
        name = match[0].decode("ascii")
        return name in self._names or COUNTED.sub("", name) in self._names


def ask_page(
    url: str, key: str | None, seconds: float, names: Collection[str] | None = None
) -> Page | None:
    """Return the page of a server's ``/metrics``, or of some ``names``; None if it has none.

    Raises EndpointError: there is no answer within ``seconds``, or it is too large.
    """
    reader = Reader(names)
    answer = call(f"{url}/metrics", key=key, seconds=seconds, limit=LARGEST_PAGE, take=reader.feed)
    return reader.page() if answer.ok else None


def parse(text: str) -> Page:
    """Return the samples of a text in Prometheus' format; broken lines are only counted."""
    reader = Reader()
    reader.feed(text.encode("utf-8", "replace"))
    return reader.page()


def of_mapping(values: Mapping[str, Any]) -> Page:
    """Return a page from metrics by name; a name may have labels, as on a page."""
    lines = [f"{name} {value}" for name, value in values.items() if not isinstance(value, bool)]
    return parse("\n".join(lines))
