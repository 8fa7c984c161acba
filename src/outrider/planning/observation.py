"""What is known of a server or a run: facts from an endpoint, a saved page, or a report."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from ..errors import ConfigError, shown
from ..scraping import Page, of_mapping, parse
from .endpoint import Endpoint
from .facts import Value, check_facts
from .host import is_local, load_facts
from .metrics import add_survival, facts_of

PLAIN = {
    "acceptance_rate": "acceptance", "speedup": "speedup", "temperature": "temperature",
    "acceptance_length": "acceptance_length", "batch_size": "running",
    "spec_decode_acceptance_length": "acceptance_length", "max_concurrency": "running",
    "num_speculative_tokens": "draft_length", "spec_decode_draft_tokens": "drafted",
    "completed": "requests",
}  # fmt: skip
"""Keys of reports, and the facts that they are."""
SCALED = {
    "spec_decode_acceptance_rate": ("acceptance", 100.0), "mean_ttft_ms": ("ttft", 1000.0),
    "median_ttft_ms": ("ttft", 1000.0), "mean_tpot_ms": ("tpot", 1000.0),
    "median_tpot_ms": ("tpot", 1000.0), "latency_per_token_ms": ("tpot", 1000.0),
}  # fmt: skip
"""Keys of reports in other units, and what one of ours is in them."""
POSITIONS = ("spec_decode_per_position_acceptance_rates", "acceptance_by_position")
LOOKUPS = ("ngram", "suffix", "prediction")
TOLD = {"outputs_identical", *PLAIN, *SCALED, *POSITIONS} - {"temperature", "max_concurrency"}


@dataclass
class Observation:
    """Facts of one server or one run.

    Attributes:
        where: which run, or which server.
        hardware: the device's name, "" if nobody knows.
        page: the samples of ``/metrics``, where there were any.
        endpoint: whom it was read from, None if from a file.
        notes: what could not be read.
    """

    where: str
    facts: dict[str, Value]
    hardware: str = ""
    page: Page | None = None
    endpoint: Endpoint | None = None
    notes: list[str] = field(default_factory=list)

    def saved(self) -> dict[str, Any]:
        """Return it as an object that ``observe`` reads again from a JSON file."""
        told = {} if self.page is None else facts_of(self.page)
        other = {name: value for name, value in self.facts.items() if told.get(name) != value}
        lines = [] if self.page is None else self.page.lines()
        return {"where": self.where, "metrics": lines, "facts": other}


def observe(source: str | Path, key: str | None = None, seconds: float = 0.0) -> list[Observation]:
    """Return what a source tells, one observation for each run of a report.

    Args:
        source: an address; or a file with a page of ``/metrics``, with metrics by name as JSON,
            with what ``--save`` wrote, or with a report of ``outrider bench`` or
            ``vllm bench serve``.
        key: the API key of an endpoint.
        seconds: how long to watch an endpoint; 0 takes what it counted since its start.

    Raises:
        ConfigError: the source is none, or has another shape.
        EndpointError: the server is down, or does not speak OpenAI's API.
    """
    path = Path(source)
    try:
        is_file = path.is_file()
    except (OSError, ValueError):
        is_file = False
    text = str(source)
    if is_file:
        return read_file(path)
    if "://" not in text and (path.suffix in (".json", ".prom", ".txt") or path.is_dir()):
        raise ConfigError(f"{shown(text)} is no file; give an address, metrics or a report.")
    return [ask(Endpoint(text, key), seconds)]


def ask(endpoint: Endpoint, seconds: float = 0.0, since: Page | None = None) -> Observation:
    """Return what a running server tells, and this machine where the server is on it.

    Args:
        seconds: what is counted within them; 0 is all since the server's start.
        since: an earlier page, from which on to count instead.
    """
    endpoint.model()
    if seconds > 0:
        text = endpoint.metrics()
        since = None if text is None else parse(text)
        time.sleep(seconds)
    text = endpoint.metrics()
    if text is None:
        facts: dict[str, Value] = {"metrics": "no", "speculation_counters": "no"}
        return Observation(endpoint.url, facts, endpoint=endpoint)
    page = parse(text)
    found = of_page(page if since is None else page.since(since), endpoint.url)
    found.endpoint = endpoint
    if is_local(endpoint.host):
        running = found.facts.get("running", 0.0)
        found.facts |= load_facts(isinstance(running, float) and running >= 1)
    return found


def of_page(page: Page, where: str) -> Observation:
    """Return the facts of a page of metrics.

    Raises:
        ConfigError: it has no metrics of an engine that is known.
    """
    facts = facts_of(page)
    if not facts:
        what = (
            "no metrics of a known engine" if page.samples else "no metrics in Prometheus' format"
        )
        raise ConfigError(f"{where} has {what}; give the engine's own address, or its /metrics.")
    found = Observation(where, facts, page=page)
    if page.broken:
        found.notes.append(f"{page.broken} lines of the metrics are broken and were passed over.")
    return found


def read_file(file: Path) -> list[Observation]:
    """Return what a file tells.

    Raises:
        ConfigError: it cannot be read, or has another shape.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is not UTF-8 text; give metrics or a report.") from None
    if not text.lstrip().startswith(("{", "[")):
        return [of_page(parse(text), file.name)]
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError(f"{file} is not JSON; give metrics or a report.") from None
    found = of_json(content, file.name)
    if not found:
        raise ConfigError(
            f"{file} holds neither metrics nor a report of a benchmark with figures; write one "
            "with outrider diagnose ENDPOINT --save FILE, or outrider bench --json FILE."
        )
    return found


def of_json(content: object, where: str) -> list[Observation]:
    """Return what a JSON object tells, nothing if it has another shape."""
    if not isinstance(content, dict):
        return []
    if "metrics" in content:
        return [_of_saved(content, where)]
    if isinstance(content.get("runs"), list):
        machine = content.get("machine")
        runs = [run for run in content["runs"] if isinstance(run, dict)]
        found = [_of_run(run, machine) for run in runs if _drafts(run)]
        return [each for each in found if each.facts]
    if TOLD & set(content):
        found = [_of_run(content, content.get("machine"), where)]
        return [each for each in found if each.facts]
    page = of_mapping(content)
    return [of_page(page, where)] if facts_of(page) else []


def _of_saved(content: Mapping[str, Any], where: str) -> Observation:
    metrics, stated = content["metrics"], content.get("facts", {})
    if isinstance(metrics, list) and all(isinstance(line, str) for line in metrics):
        metrics = "\n".join(metrics)
    if not isinstance(stated, dict):
        raise ConfigError(f"{where} has facts that are no object; give them by name.")
    facts = check_facts(stated)
    if isinstance(metrics, dict):
        found = of_page(of_mapping(metrics), where)
    elif isinstance(metrics, str):
        found = of_page(parse(metrics), where) if metrics.strip() else Observation(where, {})
    else:
        raise ConfigError(f"{where} has metrics that are neither text nor by name; save them anew.")
    found.facts |= facts
    return found


def _drafts(run: Mapping[str, Any]) -> bool:
    """Return whether a run of a report speculates, as far as the report says."""
    return run.get("drafter") != "none" and run.get("num_speculative_tokens") != 0


def _of_run(run: Mapping[str, Any], machine: object, where: str = "") -> Observation:
    names = ("label", "workload", "dataset", "drafter", "batch_size", "num_speculative_tokens")
    parts = [f"{name} {run[name]}" for name in names if run.get(name) not in (None, "")]
    found = Observation(", ".join(parts) or where, {})
    for key, fact in PLAIN.items():
        _take(found, key, run.get(key), fact, 1.0)
    for key, (fact, scale) in SCALED.items():
        _take(found, key, run.get(key), fact, scale)
    for key in POSITIONS:
        survival = run.get(key)
        if isinstance(survival, list) and all(_number(each) is not None for each in survival):
            length = found.facts.get("draft_length")
            add_survival(found.facts, [float(each) for each in survival])
            if length is not None:
                found.facts["draft_length"] = length
        elif survival is not None:
            found.notes.append(f"{key} is no list of shares and was passed over.")
    if run.get("drafter") in LOOKUPS:
        found.facts["method"] = "lookup"
    _add_outputs(found, run)
    _add_source(found, run.get("spec_decode_source"))
    _add_machine(found, run.get("machine"))
    if isinstance(machine, dict):
        found.hardware = str(machine.get("gpu") or machine.get("cpu") or "")
    return found


def _take(found: Observation, key: str, value: object, fact: str, scale: float) -> None:
    """Add a figure of a report; say so where it is none."""
    if value is None:
        return
    number = _number(value)
    if number is None or (fact == "acceptance" and number / scale > 1):
        found.notes.append(f"{key} is {shown(value)} and was passed over.")
        return
    found.facts[fact] = number / scale


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if isfinite(value) and value >= 0 else None
    except OverflowError:
        return None


def _add_outputs(found: Observation, run: Mapping[str, Any]) -> None:
    identical, differences = run.get("outputs_identical"), run.get("differences")
    samples = _number(run.get("num_samples"))
    if isinstance(identical, bool):
        share = 0.0 if identical else 1.0
        if not identical and isinstance(differences, list) and differences and samples:
            share = min(1.0, len(differences) / samples)
        found.facts["output_differs"] = share


def _add_source(found: Observation, source: object) -> None:
    """Add what ``bench serve`` says of a server's counters."""
    if isinstance(source, str):
        inactive = "NOT ACTIVE" in source
        counted = inactive or not source.startswith("none")
        found.facts["speculation_counters"] = "yes" if counted else "no"
        if inactive:
            found.facts["drafted"] = 0.0


def _add_machine(found: Observation, machine: object) -> None:
    """Add the utilisation that ``bench serve`` measured."""
    if not isinstance(machine, dict):
        return
    for key in ("cpu_percent", "gpu_percent"):
        spread = machine.get(key)
        share = _number(spread.get("mean")) if isinstance(spread, dict) else None
        if share is not None:
            found.facts["utilisation"] = min(1.0, share / 100)
