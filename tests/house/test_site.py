"""The documentation site: its pages, their readers, and links that hold there and on GitHub."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

from dev import website
from tests.support import REPOSITORY
from tests.support.forked import Served

DOCS = REPOSITORY / "docs"
GENERATED = {f"reference/{name}.md" for name in website.PAGES}
PAGES = sorted(
    path
    for file in DOCS.rglob("*.md")
    if (path := str(file.relative_to(DOCS))) not in GENERATED
)  # fmt: skip
INTERVAL = re.compile(r"\d \[-?\d[\d.]* \d")
"""A measured figure with its interval, as in 1.47 [1.44 1.50]."""
ORIGIN = {
    "command": re.compile(r"(outrider|python -m|make) [\w-]+|script[s]? that (was|were) not kept"),
    "machine": re.compile(r"Xeon|EPYC|Zen \d|same machine"),
    "date": re.compile(r"2026-\d\d-\d\d|\d+ November 2026"),
}
HOME = "index.md"
"""It is the only page that may lead to generated ones: they are not there on GitHub."""


@cache
def tokens(page: str) -> tuple[Token, ...]:
    """Return the parts of a page, those within lines too."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found = MarkdownIt("commonmark", {"html": True}).enable("table").parse(text)
    return tuple(part for token in found for part in (token, *(token.children or ())))


@cache
def anchors(page: str) -> frozenset[str]:
    """Return the anchors of headings; the site and GitHub number equal ones differently."""
    headings = [
        inner.content
        for token, inner in zip(tokens(page), tokens(page)[1:], strict=False)
        if token.type == "heading_open"
    ]
    names = [slug(re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading)) for heading in headings]
    return frozenset(name for name in names if names.count(name) == 1)


def slug(heading: str) -> str:
    """Return GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def targets(page: str) -> Iterator[str]:
    """Yield what links and pictures of a page lead to."""
    for token in tokens(page):
        if target := token.attrs.get("href") or token.attrs.get("src"):
            yield str(target)


def wrong(page: str, target: str) -> str | None:
    """Return what is wrong with a link, None for nothing."""
    if re.match(r"https?://|mailto:", target):
        return None
    path, _, anchor = target.partition("#")
    there = (DOCS / page).parent / path if path else DOCS / page
    if DOCS not in there.resolve().parents:
        return "leads out of docs, where the site has nothing; name the path in backquotes"
    name = str(there.resolve().relative_to(DOCS))
    if name in GENERATED:
        return None if page == HOME else f"leads to a generated page; link {HOME}#reference"
    if not there.is_file():
        return "leads to no file"
    if anchor and anchor not in anchors(name):
        return "leads to no heading"
    return None


def listed(part: Any) -> Iterator[str]:
    """Yield the pages of the navigation."""
    if isinstance(part, str):
        yield part
    else:
        for inner in part.values() if isinstance(part, dict) else part:
            yield from listed(inner)


def navigation() -> list[Any]:
    text = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8")
    return yaml.safe_load(re.sub(r"!!python.*", "", text))["nav"]


def test_every_page_is_in_the_navigation_once() -> None:
    assert sorted(listed(navigation())) == sorted([*PAGES, *GENERATED])


def test_the_navigation_has_four_parts() -> None:
    parts = [name for part in navigation() for name in part]
    assert parts == ["Home", "Use", "Operate", "Understand", "Contribute"]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    assert [f"{to}: {why}" for to in targets(page) if (why := wrong(page, to))] == []


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("nowhere.md", "no file"),
        ("server.md#nowhere", "no heading"),
        ("#nowhere", "no heading"),
        ("images/nowhere.png", "no file"),
        ("../README.md", "out of docs"),
        ("/server.md", "out of docs"),
        ("reference/cli.md", "generated page"),
    ],
)
def test_a_link_to_nowhere_is_found(target: str, problem: str) -> None:
    assert problem in wrong("drafters.md", target)


@pytest.mark.parametrize("page", PAGES)
def test_the_first_line_says_who_a_page_is_for(page: str) -> None:
    title, blank, readers, after, *_ = (DOCS / page).read_text(encoding="utf-8").splitlines()
    assert title.startswith("# ")
    assert re.fullmatch(r"For people who (?:[^.]|\.\w)*\.", readers), readers
    assert blank == after == ""


@pytest.mark.parametrize("page", PAGES)
def test_measured_figures_have_their_command_machine_and_date(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    for section in re.split(r"^(?=#+ )", text, flags=re.MULTILINE):
        if INTERVAL.search(section):
            missing = [name for name, origin in ORIGIN.items() if not origin.search(section)]
            assert missing == [], f"{page}: {section.splitlines()[0]} lacks its {missing}"


def test_the_reference_has_the_help_of_every_command() -> None:
    page = website.command_line()
    assert page.count("Usage: outrider") == page.count("\n## outrider") > 40
    assert "Usage: outrider ops guard run " in page
    assert "Usage: outrider bench serve " in page
    assert "--shutdown-timeout" in page


def test_the_reference_explains_what_a_server_publishes(server: Served) -> None:
    def read(path: str) -> str:
        with urllib.request.urlopen(f"{server.url}{path}") as answer:
            return answer.read().decode()

    metrics = website.metrics(read("/metrics"))
    assert "| `vllm:iteration_tokens_total` | histogram |  | Rows computed" in metrics
    assert "| `outrider_request_errors_total` | counter | `code` | Failed calls" in metrics
    assert "_created" not in metrics
    assert not re.search(r"\|  \|$", metrics, re.MULTILINE), "a metric has no meaning"
    fields = website.fields(json.loads(read("/openapi.json")))
    assert "| `temperature` | number, from 0 to 1,000,000 |" in fields
    assert "| `messages` | list of object, from 1 to 4,096 items | required |" in fields
    named = {slug(name) for name in re.findall(r"^#+ (.*)$", fields, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]*)\)", fields)) <= named


def test_dead_links_of_a_built_site_are_found(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "index.html").write_text('<h2 id="part">Part</h2>')
    links = "there/", "there/#part", "there/#gone", "gone/", "#gone", "https://example.com/gone"
    text = "".join(f'<a href="{link}">a</a>' for link in links)
    (tmp_path / "index.html").write_text(f'{text}<img src="gone.png">')
    dead = [line.removeprefix("index.html: ") for line in website.dead_links(tmp_path)]
    assert dead == ["there/#gone", "gone/", "#gone", "gone.png"]


@pytest.mark.slow
def test_the_site_builds_strictly() -> None:
    if not website.ZENSICAL.exists():
        pytest.skip("make site installs Zensical, which is missing")
    done = subprocess.run(
        [sys.executable, "-m", "dev.website"], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (website.SITE / "reference" / "options" / "index.html").exists()
