"""Builds the documentation site into build/site: ``python -m dev.website``, or ``make site``.

It writes the pages of docs/reference from the code and from a server that runs, has Zensical build
the site strictly, and then follows every link in the HTML that came out.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import typer
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from benchmarks.served import Served
from outrider import errors
from outrider.base.config import ENGINE_OPTIONS
from outrider.base.options import Option, options_of
from outrider.cli import app, commands
from outrider.ops.markdown import table
from outrider.params import SamplingParams
from outrider.server.errors import MEANINGS, TYPES
from outrider.server.options import SERVER_OPTIONS, toml

REPOSITORY = Path(__file__).parents[1]
REFERENCE = REPOSITORY / "docs" / "reference"
SITE = REPOSITORY / "build" / "site"
ZENSICAL = REPOSITORY / "build" / "site-tools" / "bin" / "zensical"
PAGES = ("options", "fields", "metrics", "cli", "errors")
"""The pages of docs/reference."""
BELIEF_SECONDS = 2.0
"""Until a server's metrics have what its engine has come to believe."""
MADE = "`make site` has made this page from the code."
WIDTH = "100"
EXIT_CODES = {
    0: "done",
    commands.FAILED: "failed, or a check found something; the last line says what",
    commands.BAD_USAGE: "bad usage: a wrong option, argument, config or request",
    commands.INTERRUPTED: "interrupted (Ctrl+C)",
    commands.BROKEN_PIPE: "the reader of the output has gone",
}


STATUSES = MEANINGS | {
    403: "The Host, the Origin or the switch is not for this client.",
    405: "The path has no such method.",
    409: "Another drafter is being loaded.",
    431: "The headers are too large.",
    500: "The server or the model failed.",
}
"""What statuses mean; the published schema has those that every path may answer."""


def page(title: str, readers: str, *parts: str) -> str:
    """Return a page of the reference, its readers named below the title."""
    return "\n\n".join((f"# {title}", readers, MADE, *parts)) + "\n"


def lines(names: tuple[str, ...], rows: Iterator[tuple[object, ...]]) -> str:
    """Return a table in Markdown."""
    return "\n".join(table(names, rows)).rstrip()


def options() -> str:
    """Return the page of all options of the engine, the server and a request."""
    sampling = tuple(options_of(SamplingParams))
    parts = [
        "Each name is a flag of `outrider serve` (`max_num_seqs` is `--max-num-seqs`), a variable "
        "(`OUTRIDER_MAX_NUM_SEQS`), and a key of the TOML file that `--config` names. Flags win "
        "over variables, and variables over the file. `outrider config` prints what is in force "
        "and where it comes from. `LLM` and `AsyncLLM` take the engine's options as keyword "
        "arguments.",
        "## The engine", _options(ENGINE_OPTIONS), "## The server", _options(SERVER_OPTIONS),
        "## A request", "These are arguments of `SamplingParams`, fields of a call, and flags of "
        "`outrider generate`. The page of fields has what calls take beside them.",
        _options(sampling),
    ]  # fmt: skip
    return page("Options", "For people who start servers or engines.", *parts)


def _options(found: tuple[Option, ...]) -> str:
    rows = (
        (
            f"`{one.name}`", one.expected, "" if one.default is None else f"`{toml(one.default)}`",
            one.help,
        )
        for one in found
    )  # fmt: skip
    return lines(("option", "value", "default", "meaning"), rows)


def command_line() -> str:
    """Return the page with the help of every command."""
    parts: list[str] = []
    for words in _commands(typer.main.get_command(app), ()):
        said = CliRunner().invoke(
            app, [*words, "--help"], prog_name="outrider", env={"COLUMNS": WIDTH},
            terminal_width=int(WIDTH), max_content_width=int(WIDTH),
        )  # fmt: skip
        text = "\n".join(line.rstrip() for line in said.output.strip().splitlines())
        parts += [f"## {' '.join(('outrider', *words))}", f"```text\n{text}\n```"]
    return page("Command line", "For people who use `outrider` in a terminal.", *parts)


def _commands(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the words of a command and of all below it."""
    yield words
    for name, inner in getattr(command, "commands", {}).items():
        yield from _commands(inner, (*words, name))


def fields(schema: Mapping[str, Any]) -> str:
    """Return the page of the fields of every call, of a server's published schema."""
    kinds, parts, shown = schema["components"]["schemas"], [], set()
    for path, methods in schema["paths"].items():
        for method, about in methods.items():
            parts += [f"## {method.upper()} {path}", about["description"].partition("\n")[0]]
            body = about.get("requestBody")
            if body is None:
                continue
            name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
            if name in shown:
                parts.append(f"The fields of `{name}`, as above.")
                continue
            shown.add(name)
            parts += [f"The body is a `{name}`.", *_fields(kinds[name])]
    inner = sorted(set(kinds) - shown, key=_short)
    parts.append("## Objects in fields")
    for name in inner:
        about = " ".join(kinds[name].get("description", "").replace("``", "`").split())
        parts += [f"### {_short(name)}", about, *_fields(kinds[name])]
    sentence = (
        "[The server](../server.md#fields) explains the fields whose meaning is not the one of "
        "OpenAI, Anthropic or vLLM. A server publishes the same at `/openapi.json`."
    )
    return page("Fields of calls", "For people who write clients.", sentence, *filter(None, parts))


def _short(name: str) -> str:
    """Return an object's name; the schema has modules before it where two are called alike."""
    return name.removeprefix("outrider__server__").replace("__", ".")


def _fields(kind: Mapping[str, Any]) -> list[str]:
    """Return the table of an object's fields, and those that may only ask for nothing."""
    known = {one.name: one.help for one in options_of(SamplingParams)}
    taken, neutral = [], []
    for name, about in kind["properties"].items():
        if None in about.get("enum", ()):
            values = [json.dumps(value) for value in about["enum"]]
            neutral.append(f"`{name}` ({', '.join(values)})")
            continue
        default = json.dumps(about["default"]) if about.get("default") is not None else ""
        needed = "required" if name in kind.get("required", ()) else default and f"`{default}`"
        taken.append((f"`{name}`", _kind(about), needed, known.get(name, "")))
    found = [lines(("field", "value", "default", "meaning"), iter(taken))] if taken else []
    if neutral:
        found.append(f"Refused, unless they have these values: {', '.join(neutral)}.")
    return found


def _kind(about: Mapping[str, Any]) -> str:
    """Return in words which values a part of a schema allows."""
    if "$ref" in about:
        name = _short(about["$ref"].rpartition("/")[2])
        return f"[{name}](#{name.lower().replace('.', '')})"
    if "anyOf" in about:
        inner = [_kind(one) for one in about["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(inner)) + _limits(about)
    if "enum" in about or "const" in about:
        return ", ".join(f"`{value}`" for value in about.get("enum") or [about["const"]])
    word = about.get("type", "any value")
    if word == "array":
        word = f"list of {_kind(about.get('items', {}))}"
    return word + _limits(about)


def _limits(about: Mapping[str, Any]) -> str:
    """Return the bounds of a value in words."""
    words = {
        "minimum": "from {:,.15g}", "exclusiveMinimum": "above {:,.15g}", "maximum": "to {:,.15g}",
        "minItems": "from {:,}", "maxItems": "to {:,} items", "maxProperties": "to {:,} entries",
        "maxLength": "to {:,} characters",
    }  # fmt: skip
    found = [word.format(about[name]) for name, word in words.items() if name in about]
    return f", {' '.join(found)}" if found else ""


def metrics(text: str) -> str:
    """Return the page of the metrics that a server's ``/metrics`` has."""
    rows: list[tuple[str, str, str, str]] = []
    for family in text_string_to_metric_families(text):
        if family.name.endswith("_created"):
            continue
        labels = dict.fromkeys(label for sample in family.samples for label in sample.labels)
        own = ", ".join(f"`{x}`" for x in labels if x not in ("model_name", "engine", "le"))
        name = family.name + "_total" * (family.type == "counter")
        rows.append((f"`{name}`", family.type, own, family.documentation))
    ours = sorted(row for row in rows if row[0].startswith("`outrider_"))
    theirs = sorted(row for row in rows if not row[0].startswith("`outrider_"))
    names = "metric", "type", "labels", "meaning"
    parts = [
        "Every metric has the labels `model_name` and `engine`. Histograms are in seconds or "
        "tokens, and have `_bucket`, `_count` and `_sum`. [Metrics of the server](../server.md"
        "#metrics) has more on some of them, [Monitoring](../monitoring.md) the alerts and the "
        "dashboard.",
        "## Outrider's own", lines(names, iter(ours)),
        "## By vLLM's names", lines(names, iter(theirs)),
    ]  # fmt: skip
    return page("Metrics", "For people who watch a server with Prometheus.", *parts)


def failures() -> str:
    """Return the page of exit codes, HTTP statuses and Python's errors."""
    statuses = (
        (f"`{status}`", f"`{kind}`", STATUSES[status])
        for status, kind in TYPES.items()
        if status in STATUSES
    )
    found = [
        (f"`{name}`", f"`{one.__base__.__name__}`", (one.__doc__ or "").replace("``", "`"))
        for name, one in vars(errors).items()
        if isinstance(one, type) and issubclass(one, errors.OutriderError)
    ]
    parts = [
        "## Exit codes", "All commands have the same codes.",
        lines(("code", "meaning"), iter((f"`{c}`", text) for c, text in EXIT_CODES.items())),
        "## HTTP statuses",
        'An error is `{"error": {"message", "type", "param", "code"}}`. The message says what is '
        "wrong, where, and what to do.",
        lines(("status", "type", "meaning"), statuses),
        "## Errors in Python", "They are in `outrider.errors`.",
        lines(("error", "base", "meaning"), iter(found)),
    ]  # fmt: skip
    return page("Exit codes and errors", "For people who handle failures in programs.", *parts)


def write() -> None:
    """Write the pages of the reference; a server of the bundled pair tells of its fields."""
    REFERENCE.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        Served("pocket", "--log-level", "error", "--record", folder) as server,
    ):
        body = {"prompt": "def fib(n):", "max_tokens": 32}
        sent = urllib.request.Request(
            f"{server.url}/v1/completions", json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )  # fmt: skip
        _read(sent)
        time.sleep(BELIEF_SECONDS)
        schema = json.loads(_read(f"{server.url}/openapi.json"))
        told = _read(f"{server.url}/metrics")
    pages = options(), fields(schema), metrics(told), command_line(), failures()
    for name, text in zip(PAGES, pages, strict=True):
        (REFERENCE / f"{name}.md").write_text(text, encoding="utf-8")


def _read(what: str | urllib.request.Request) -> str:
    with urllib.request.urlopen(what) as answer:
        return answer.read().decode()


class _Links(HTMLParser):
    """The targets of a page's links and pictures, and its anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep what a tag leads to, and its name."""
        found = dict(attrs)
        self.anchors |= {name for key in ("id", "name") if (name := found.get(key))}
        key = "href" if tag in ("a", "link") else "src"
        if (target := found.get(key)) is not None:
            self.targets.append(target)


def dead_links(site: Path) -> list[str]:
    """Return the links of a built site that lead nowhere, or from which a browser loads."""
    pages = {}
    for file in sorted(site.rglob("*.html")):
        pages[file] = _Links()
        pages[file].feed(file.read_text(encoding="utf-8"))
    found = []
    for file, links in pages.items():
        if file.name == "404.html":  # its links begin at the host's root
            continue
        for target in dict.fromkeys(links.targets):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc or target.startswith("data:"):
                continue
            there = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            there = there / "index.html" if there.is_dir() else there
            known = pages[there].anchors if there in pages else {parts.fragment}
            if not there.exists() or (parts.fragment and unquote(parts.fragment) not in known):
                found.append(f"{file.relative_to(site)}: {target}")
    return found


def main() -> None:
    """Write the reference, build the site, and check its links."""
    write()
    if subprocess.run([ZENSICAL, "build", "--strict", "--clean"], cwd=REPOSITORY).returncode:
        sys.exit("The site was not built; each problem stands above.")
    if dead := dead_links(SITE):
        sys.exit("\n".join(["These links of the site lead nowhere:", *dead]))
    print(f"The site is in {SITE.relative_to(REPOSITORY)}: python -m http.server -d build/site")


if __name__ == "__main__":
    main()
