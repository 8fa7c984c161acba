"""Numbers at the boundaries of their types, every field that takes one, and an engine to try them.

Fields are read from dataclasses and from published schemas, so that a new one is covered.
"""

from __future__ import annotations

import math
import multiprocessing
import traceback
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import outrider.native
from outrider import LLM, SamplingParams
from outrider.base.config import EngineConfig
from outrider.base.limits import LOOKUP, REQUEST, SPECULATION
from outrider.base.types import Request, Speculation
from outrider.errors import OutriderError
from outrider.params import SAMPLING

VALUES: tuple[Any, ...] = (
    0, -1, 1, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1, 2**32, 2**32 + 7, 2**53, 2**63 - 1, 2**63,
    2**63 + 1, 2**64, -(2**31), -(2**63) - 1, 10**19, 10**4000, 1e38, -1e38, 3.5e38, 1e308, -1e308,
    5e-324, -5e-324, 1e-40, math.nan, math.inf, -math.inf, True,
)  # fmt: skip
CHECKPOINTS = frozenset({"eos_token_ids"})
"""Fields that only a checkpoint fills."""
SLOWEST_SECONDS = 300.0

ENGINE = {
    each.name: each.metadata["number"]
    for each in fields(EngineConfig)
    if each.metadata["number"] is not None
}
EDGES = {
    name: (number.least, number.most, number.least - 1, number.most + 1)
    for name, number in (SAMPLING | SPECULATION | REQUEST | ENGINE | LOOKUP).items()
}
"""The ends of each field's own range."""

Make = Callable[[Any], Any]


class Field(NamedTuple):
    """A place for a number: ``make`` gives the field ``name`` of ``owner`` a value around it."""

    owner: str
    name: str
    make: Make

    @property
    def values(self) -> tuple[Any, ...]:
        """The numbers to try."""
        return (*VALUES, *EDGES.get(self.name, ()))


def of_hint(hint: Any) -> Iterator[Make]:
    """Ways to put a number where a type hint takes one."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if hint in (int, float):
        yield lambda value: value
    elif origin in (typing.Union, types.UnionType):
        for part in inside:
            yield from of_hint(part)
    elif origin in (list, tuple, frozenset) and inside[0] is int:
        yield lambda value: origin((value,))
        yield lambda value: origin((5, value))
    elif inside[:1] == (int,):
        yield lambda value: {value: 1.0}
        yield lambda value: {5: value}


def of_dataclass(owner: type) -> list[Field]:
    """Every place for a number in a dataclass."""
    hints = typing.get_type_hints(owner)
    return [
        Field(owner.__name__, name, make)
        for name, hint in hints.items()
        if name not in CHECKPOINTS
        for make in of_hint(hint)
    ]


def of_schema(schema: Mapping[str, Any], all_of: Mapping[str, Any]) -> Iterator[Make]:
    """Ways to put a number where a JSON schema takes one; ``all_of`` holds what it refers to."""
    if "$ref" in schema:
        yield from of_schema(all_of[schema["$ref"].rpartition("/")[2]], all_of)
    for part in schema.get("anyOf", ()):
        yield from of_schema(part, all_of)
    kind = schema.get("type")
    if kind in ("integer", "number"):
        yield lambda value: value
    elif kind == "array":
        for make in of_schema(schema["items"], all_of):
            yield lambda value, make=make: [make(value)]  # type: ignore[misc]
    elif kind == "object":
        for name, part in schema.get("properties", {}).items():
            for make in of_schema(part, all_of):
                yield lambda value, name=name, make=make: {name: make(value)}  # type: ignore[misc]
        if isinstance(schema.get("additionalProperties"), dict):
            for make in of_schema(schema["additionalProperties"], all_of):
                yield lambda value, make=make: {"5": make(value)}  # type: ignore[misc]
                yield lambda value: {_digits(value): 1}


def _digits(value: Any) -> str:
    return str(int(value)) if isinstance(value, int) or math.isfinite(value) else str(value)


def of_body(model: Any) -> list[Field]:
    """Every place for a number in a body that a server takes."""
    schema = model.model_json_schema()
    return [
        Field(model.__name__, name, make)
        for name, part in schema["properties"].items()
        for make in of_schema(part, schema.get("$defs", {}))
    ]


Case = Mapping[str, Mapping[str, Any]]
"""By dataclass, the fields that are not their defaults."""


def engine_process(link: Connection, folder: Path, libraries: list[str]) -> None:
    """Answer cases until the pipe closes: ok, refused with a sentence, or raised with a trace."""
    outrider.native.__path__ = libraries  # a sanitized build may stand first
    llm = LLM(folder, drafter="ngram", memory=2**24, num_speculative_tokens=3)
    link.send(("ready", ""))
    while True:
        try:
            case: Case = link.recv()
        except EOFError:
            return
        try:
            link.send(("ok", run(llm, folder, case)))
        except OutriderError as error:
            link.send(("refused", str(error)))
        except Exception:
            link.send(("raised", traceback.format_exc()))


def run(llm: LLM, folder: Path, case: Case) -> str:
    """Serve one case by ``LLM.generate``, or by the engine where it is no field of that."""
    params = SamplingParams(**{"max_tokens": 3, **case.get("SamplingParams", {})})
    if "EngineConfig" in case:
        options = {"memory": 2**26, "num_speculative_tokens": 3, **case["EngineConfig"]}
        llm = LLM(folder, drafter="ngram", **options)
        return llm.generate("the quick brown fox", params)[0].outputs[0].text
    if case.keys() <= {"SamplingParams"}:
        return llm.generate("the quick brown fox", params)[0].outputs[0].text
    speculation = Speculation(**case.get("Speculation", {}))
    request = Request("boundary", (72, 298), params, 1, speculation=speculation)
    llm.engine.add(replace(request, **case.get("Request", {})))
    while llm.engine.has_work:
        llm.engine.step()
    return ""


class EngineProcess:
    """An engine in a process of its own, so that a signal is seen as its death."""

    def __init__(self, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._link, its = context.Pipe()
        libraries = list(outrider.native.__path__)
        self._process = context.Process(
            target=engine_process, args=(its, folder, libraries), daemon=True
        )
        self._process.start()
        its.close()
        assert self._answer() == ("ready", "")

    def ask(self, case: Case) -> tuple[str, str]:
        """What becomes of a case.

        Raises:
            AssertionError: the engine died or hangs.
        """
        self._link.send(case)
        return self._answer()

    def _answer(self) -> tuple[str, str]:
        assert self._link.poll(SLOWEST_SECONDS), "the engine hangs"
        try:
            found: tuple[str, str] = self._link.recv()
        except EOFError:
            self._process.join()
            raise AssertionError(f"the engine ended with {self._process.exitcode}") from None
        return found

    def close(self) -> None:
        """End the process."""
        self._link.close()
        self._process.kill()
        self._process.join()
