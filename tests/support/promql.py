"""Evaluates PromQL with Prometheus' own ``promtool``, on series that a test writes."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.support import DATA

EXPOSITIONS = DATA / "expositions"
COUNTED = re.compile(r"_(total|sum|count|bucket)$")
WORDS = {"and", "or", "unless", "bool", "by", "on", "group_left", "inf"}

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is missing: apt-get install prometheus"
)


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False
    )


def check(folder: Path, rules: str, tests: list[dict[str, Any]]) -> None:
    """Run promtool's unit tests of rules, one sample a minute; fail with what it says."""
    (folder / "rules.yaml").write_text(rules)
    suite = {
        "rule_files": ["rules.yaml"], "evaluation_interval": "1m",
        "tests": [{"interval": "1m", **test} for test in tests],
    }  # fmt: skip
    file = folder / "suite.yaml"
    file.write_text(yaml.safe_dump(suite))
    done = promtool("test", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr


def series(values: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"series": name, "values": each} for name, each in values.items()]


def samples(text: str) -> list[Sample]:
    """The samples of a page, without times of creation."""
    return [
        sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]


def scraped(text: str, job: str, instance: str) -> dict[str, str]:
    """A page as Prometheus would have it after ten minutes in which its counters grew evenly."""
    found = {}
    for sample in samples(text):
        labels = {**sample.labels, "job": job, "instance": instance}
        inner = ",".join(f'{name}="{value}"' for name, value in sorted(labels.items()))
        growing = f"0+{sample.value / 10:f}x10" if COUNTED.search(sample.name) else ""
        found[f"{sample.name}{{{inner}}}"] = growing or f"{sample.value:f}x10"
    return found


def names(expressions: Iterable[str]) -> set[str]:
    """The metrics that expressions name."""
    found = set()
    for expression in expressions:
        bare = re.sub(r'"[^"]*"', "", expression)
        bare = re.sub(r"\{[^}]*\}|\[[^]]*\]", "", bare)
        bare = re.sub(r"\b(by|on|group_left) *\([^)]*\)", "", bare)
        found |= set(re.findall(r"(?<![\w:.$])[a-zA-Z_:][\w:]*(?! *\()\b(?![\w:]* *\()", bare))
    return found - WORDS
