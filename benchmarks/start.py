"""Measures how soon a server answers, and the memory that it holds.

Seconds from the start of ``outrider serve`` until it is ready, at a machine's first start, which
measures what steps cost, and at later ones; and the peak of resident memory of both processes after
a few chats, added up. Figures are medians over rounds; files are in the page cache.
"""

import json
import time
from collections.abc import Sequence
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated
from urllib.request import Request, urlopen

import typer

from outrider.bench.machine import machine
from outrider.cli.common import JsonFile, write_json

from .common import POCKET, Model, Rounds, in_turns
from .served import Served

CHATS = 4
TEXT = "Write a short poem about the sea and the number {}."


def started(model: str, options: Sequence[str], cache: str) -> tuple[float, float]:
    """Return the seconds until a server was ready, and MB resident at most after the chats.

    ``cache`` is the folder that keeps what steps cost.
    """
    begin = time.perf_counter()
    with Served(model, *options, XDG_CACHE_HOME=cache) as server:
        seconds = time.perf_counter() - begin
        for number in range(CHATS):
            messages = [{"role": "user", "content": TEXT.format(number)}]
            body = json.dumps({"messages": messages, "max_tokens": 64}).encode()
            call = Request(f"{server.url}/v1/chat/completions", body)
            call.add_header("Content-Type", "application/json")
            with urlopen(call, timeout=600) as answer:
                answer.read()
        return seconds, server.peak() / 1e6


def main(
    model: Model = POCKET,
    options: Annotated[
        list[str] | None, typer.Argument(help="Options of outrider serve, behind --.")
    ] = None,
    rounds: Rounds = 3,
    json_: JsonFile = "-",
) -> None:
    """Measure how soon a server is ready, and its memory."""
    given = options or []

    with TemporaryDirectory() as kept:

        def run(first: bool, _: int) -> tuple[float, float]:
            with TemporaryDirectory() as empty:
                return started(model, given, empty if first else kept)

        starts = in_turns((True, False), run, rounds)
    report = {
        "first start" if first else "later start": {
            "seconds": median(s for s, _ in each),
            "peak_mb": median(mb for _, mb in each),
        }
        for first, each in starts.items()
    }
    write_json({"model": model, "options": given, "machine": machine(), **report}, json_)
