"""The facts of a server or a run, from an endpoint, a saved page, or a report."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...base.fields import is_number
from ...base.methods import LOOKUPS
from ...base.outside.documents import parse_json, read
from ...base.outside.sockets import is_local
from ...base.outside.text import printable
from ...errors import ConfigError, shown
from ..metrics import Figures, Page, of_mapping, parse
from .endpoint import Endpoint
from .facts import Value, check_facts, data, named, names, near, plain_name
from .host import load_facts

POSITIONS = ("spec_decode_per_position_acceptance_rates", "acceptance_by_position")
HEAD = ("label", "workload", "dataset", "drafter", "batch_size", "num_speculative_tokens")
"""Keys that distinguish the runs of a report."""
MOST_KEYS_NAMED = 3
LIKENESS_BESIDE_KNOWN, LIKENESS_ALONE = 0.6, 0.8
"""Similarity from which an unknown key may be a misspelt fact: beside known keys, and alone."""
Source = str | Path | Mapping[str, Any]


@dataclass
class Observation:
    """Facts of one server or one run; ``notes`` list what could not be read."""

    where: str
    facts: dict[str, Value]
    hardware: str = ""
    page: Page | None = None
    endpoint: Endpoint | None = None
    notes: list[str] = field(default_factory=list)

    def saved(self) -> dict[str, Any]:
        """Return the observation as an object that ``observe`` can read from a JSON file."""
        told = {} if self.page is None else facts_of(self.page)
        other = {name: value for name, value in self.facts.items() if told.get(name) != value}
        lines = [] if self.page is None else self.page.lines()
        return {"where": self.where, "metrics": lines, "facts": other}


def observe(source: Source, key: str | None = None, seconds: float = 0.0) -> list[Observation]:
    """Return the observations of a source, one for each run of a report.

    An address, a file with a page of ``/metrics`` or JSON, or an object like that JSON: facts or
    metrics by name, a saved diagnosis, a report of ``outrider bench`` or ``vllm bench serve``.

    Raises ConfigError: the source has no known form; EndpointError: the server is down.
    """
    if isinstance(source, Mapping):
        return of_json(source, "what was given")
    if not isinstance(source, str | Path):
        raise ConfigError(f"the source is {shown(source)}; give an address, a file or facts.")
    path, text = Path(source), str(source)
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
    except (OSError, ValueError):  # a file cannot have such a name
        is_file = is_folder = False
    if is_file:
        return read_file(path)
    if "://" not in text and (path.suffix in (".json", ".prom", ".txt") or is_folder):
        raise ConfigError(f"{shown(text)} is no file; give an address, metrics or a report.")
    return [ask(Endpoint(text, key), seconds)]


def ask(endpoint: Endpoint, seconds: float = 0.0, since: Page | None = None) -> Observation:
    """Return the facts of a running server, and this machine's if the server runs on it.

    Counts cover the next ``seconds``, else the time since an earlier page, else since its start.
    """
    endpoint.model()
    if seconds > 0:
        since = endpoint.metrics()
        time.sleep(seconds)
    page = endpoint.metrics()
    if page is None:
        facts: dict[str, Value] = {"metrics": "no", "speculation_counters": "no"}
        return Observation(endpoint.url, facts, endpoint=endpoint)
    seen = of_page(page if since is None else page.since(since), endpoint.url)
    seen.endpoint = endpoint
    if is_local(endpoint.host):
        running = seen.facts.get("running", 0.0)
        seen.facts |= load_facts(isinstance(running, float) and running >= 1)
    return seen


def of_page(page: Page, where: str) -> Observation:
    """Return the facts of a page of metrics, which must come from a known engine."""
    facts = facts_of(page)
    if not facts:
        what = "metrics of a known engine" if page.samples else "metrics in Prometheus' format"
        raise ConfigError(f"{where} has no {what}; give the engine's own address, or its /metrics.")
    seen = Observation(where, facts, page=page)
    if page.broken:
        seen.notes.append(f"{page.broken} lines of the metrics are broken and were ignored.")
    return seen


def read_file(file: Path) -> list[Observation]:
    """Return the observations in a file."""
    try:
        text = read(file, str(file)).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is not UTF-8 text; give metrics or a report.") from None
    name = printable(file.name)
    if not text.lstrip().startswith(("{", "[")):
        return [of_page(parse(text), name)]
    content = parse_json(text, str(file), unique=True)
    return of_json(content if isinstance(content, dict) else {}, name)


def of_json(content: Mapping[str, Any], where: str) -> list[Observation]:
    """Return the observations in an object: facts or metrics by name, a saved one, or a report."""
    runs, seen = content.get("runs"), content.get("seen")
    if isinstance(runs, list):
        machine = content.get("machine")
        observations = [
            _of_run(run, machine)
            for run in runs
            if isinstance(run, dict) and run.get("drafter") != "none"
            and run.get("num_speculative_tokens") != 0
        ]  # fmt: skip
        observations = [each for each in observations if each.facts]
        for each in observations:
            _take_all(each, content)
    elif isinstance(seen, list):  # an output of outrider ops diagnose --json
        saved = [each for each in seen if isinstance(each, dict)]
        observations = [_of_saved(each, _text(each.get("where", where))) for each in saved]
    elif "facts" in content or not _is_word(content.get("metrics")):
        observations = [_of_saved(content, where)]
    else:
        observations = [_of_names(content, where)]
    if not any(each.facts for each in observations):
        raise _nothing(where)
    return observations


def _nothing(where: str) -> ConfigError:
    return ConfigError(
        f"{where} holds no known facts, and neither metrics nor a report of a benchmark with "
        "figures; write one with outrider ops diagnose ENDPOINT --save FILE, or outrider bench "
        "--out FILE."
    )


def _is_word(metrics: object) -> bool:
    """Return whether ``metrics`` of an object is absent or the fact of that name, not a page."""
    words = (None, True, False, "yes", "no")
    return metrics in words if isinstance(metrics, str | bool | None) else False


def _of_saved(content: Mapping[str, Any], where: str) -> Observation:
    metrics, stated = content.get("metrics"), content.get("facts", {})
    if isinstance(metrics, list) and all(isinstance(line, str) for line in metrics):
        metrics = "\n".join(metrics)
    if not isinstance(stated, dict):
        raise ConfigError(f"{where} has facts that are no object; give them by name.")
    beside = {key: value for key, value in content.items() if key != "metrics" and named(key)}
    if isinstance(metrics, dict):
        seen = _of_names(metrics, where)
    elif _is_word(metrics):
        beside["metrics"] = metrics
        seen = Observation(where, {})
    elif isinstance(metrics, str):
        seen = of_page(parse(metrics), where) if metrics.strip() else Observation(where, {})
    else:
        raise ConfigError(f"{where} has metrics that are neither text nor by name; save them anew.")
    seen.facts |= check_facts(beside) | check_facts(stated)
    _note_unknown(seen, content)
    return seen


def _of_names(content: Mapping[str, Any], where: str) -> Observation:
    """Return the observation in a flat object; an unknown key is an error unless it has metrics."""
    if any(_listed(key, "marks") for key in content):
        return _of_run(content, content.get("machine"), where)
    stated = {key: value for key, value in content.items() if named(key)}
    read = {key: value for key, value in content.items() if _listed(key, "read")}
    other = {key: value for key, value in content.items() if key not in stated | read}
    seen = _of_run(read, content.get("machine"), where)
    numbers = {key: value for key, value in other.items() if type(value) is str or is_number(value)}
    page = of_mapping(numbers)
    if facts_of(page):
        seen.facts = of_page(page, where).facts | seen.facts
        seen.page = page
    elif other:
        likeness = LIKENESS_BESIDE_KNOWN if stated else LIKENESS_ALONE
        key = next((key for key in other if near(key, likeness)), next(iter(other)))
        if not stated and not near(key, likeness):
            raise _nothing(where)
        check_facts({key: None})  # raises the error for an unknown fact
    seen.facts |= check_facts(stated)
    return seen


def _listed(key: object, *lists: str) -> bool:
    """Return whether a key matches the catalogue's patterns for keys of reports."""
    patterns = (each for name in lists for each in data("symptoms")["report"][name])
    return isinstance(key, str) and any(re.fullmatch(pattern, key) for pattern in patterns)


def _note_unknown(seen: Observation, content: Mapping[str, Any]) -> None:
    """Note the keys of a report that are neither facts nor known."""
    keys = [k for k in content if not named(k) and not _listed(k, "read", "marks", "keys")]
    if keys:
        more = f" and {len(keys) - MOST_KEYS_NAMED} more" if len(keys) > MOST_KEYS_NAMED else ""
        hint = next((f" (did you mean {near(key)!r}?)" for key in keys if near(key)), "")
        listed = ", ".join(map(shown, keys[:MOST_KEYS_NAMED]))
        seen.notes.append(f"Unknown keys were ignored: {listed}{more}{hint}.")


def _of_run(run: Mapping[str, Any], machine: object, where: str = "") -> Observation:
    parts = [f"{name} {_text(run[name])}" for name in HEAD if run.get(name) not in (None, "")]
    seen = Observation(", ".join(parts) or where, {})
    _take_all(seen, run)
    for key in POSITIONS:
        survival = run.get(key)
        if isinstance(survival, list) and all(_number(each) is not None for each in survival):
            length = seen.facts.get("draft_length")
            add_survival(seen.facts, [float(each) for each in survival])
            if length is not None:
                seen.facts["draft_length"] = length
        elif survival is not None:
            seen.notes.append(f"{key} is not a list of shares and was ignored.")
    seen.facts |= _other_facts(run)
    if isinstance(machine, dict):
        seen.hardware = _text(machine.get("gpu") or machine.get("cpu") or "")
    _note_unknown(seen, run)
    return seen


def _other_facts(run: Mapping[str, Any]) -> dict[str, Value]:
    """Return the facts that a report has under other names than ours."""
    facts: dict[str, Value] = {}
    if run.get("drafter") in (*LOOKUPS, "prediction"):
        facts["method"] = "lookup"
    identical, differences = run.get("outputs_identical"), run.get("differences")
    samples = _number(run.get("num_samples"))
    if isinstance(identical, bool):
        facts["output_differs"] = 0.0 if identical else 1.0
        if not identical and isinstance(differences, list) and differences and samples:
            facts["output_differs"] = min(1.0, len(differences) / samples)
    if isinstance(source := run.get("spec_decode_source"), str):  # of vllm bench serve
        inactive = "NOT ACTIVE" in source
        counted = inactive or not source.startswith("none")
        facts["speculation_counters"] = "yes" if counted else "no"
        if inactive:
            facts["drafted"] = 0.0
    machine = run.get("machine")
    for key in ("cpu_percent", "gpu_percent"):
        spread = machine.get(key) if isinstance(machine, dict) else None
        share = _number(spread.get("mean")) if isinstance(spread, dict) else None
        if share is not None:
            facts["utilisation"] = min(1.0, share / 100)
    return facts


def _text(value: object) -> str:
    return printable(value) if isinstance(value, str) else shown(value)


def _take_all(seen: Observation, run: Mapping[str, Any]) -> None:
    """Add the facts of a report, the last of several names; note values that are wrong."""
    by_name = {plain_name(key): key for key in run if named(key)}
    for key in (by_name[name] for name in names() if name in by_name):
        try:
            seen.facts |= check_facts({key: run[key]})
        except ConfigError:
            seen.notes.append(f"{key} is {shown(run[key])} and was ignored.")


def _number(value: object) -> float | None:
    """Return a finite number from 0 on; None where it is something else."""
    return float(value) if is_number(value) and value >= 0 else None


PLAIN = ("running", "waiting", "kv_usage", "requests", "prefix_hits", "acceptance_length")
"""Facts that are metrics without conversion."""
SHARES = ("kv_usage", "prefix_hits", "acceptance")


def facts_of(page: Page) -> dict[str, Value]:
    """Return the facts on a page; none if the engine is unknown."""
    seen = Figures.of(page)
    if seen is None:
        return {}
    facts: dict[str, Value] = {"engine": seen.engine, "metrics": "yes"}
    for fact in PLAIN:
        value = seen.total(fact)
        if value is not None and value >= 0:
            facts[fact] = min(value, 1.0) if fact in SHARES else value
    for fact in ("ttft", "tpot"):
        if (value := seen.mean(fact) or 0.0) > 0:
            facts[fact] = value
    _share(facts, "queue_share", seen.mean("queue"), facts.get("ttft"))
    _share(facts, "prefix_hits", seen.total("hits"), seen.total("queries"))
    preempted = seen.total("preemptions")
    requests = facts.get("requests")
    if preempted is not None and isinstance(requests, float) and requests > 0:
        facts["preemptions_per_request"] = max(0.0, preempted) / requests
    ends = page.by_label(seen.names.get("requests", ""), "finished_reason")
    _share(facts, "answers_cut", ends.get("length", 0.0), sum(ends.values()))
    _speculation(facts, seen)
    # Only Outrider reports the rest.
    drafting, verifying = seen.total("drafting"), seen.total("verifying")
    if drafting is not None and verifying is not None:
        _share(facts, "draft_share", drafting, drafting + verifying)
    if length := seen.total("draft_length"):
        facts["draft_length"] = length
    if (speedup := seen.mean("speedup") or 0.0) > 0:
        facts["speedup"] = speedup
    if reasons := seen.page.by_label("outrider_speculation_off", "reason"):
        facts["speculation_off"] = printable(next(iter(reasons)))
    return facts


def _share(facts: dict[str, Value], name: str, part: float | None, whole: Any) -> None:
    if part is not None and isinstance(whole, int | float) and whole > 0 and part >= 0:
        facts[name] = min(1.0, part / whole)


def _speculation(facts: dict[str, Value], seen: Figures) -> None:
    """Add acceptance, from counters if there are any, else from gauges."""
    drafted, accepted = seen.total("drafted"), seen.total("accepted")
    length = facts.get("acceptance_length")
    if drafted is None or accepted is None:
        rate = seen.mean("acceptance")
        counted = rate is not None and isinstance(length, float) and length > 0
        facts["speculation_counters"] = "yes" if counted else "no"
        if counted and rate is not None:
            facts["acceptance"] = min(max(rate, 0.0), 1.0)
        return
    facts["speculation_counters"] = "yes"
    facts["drafted"] = drafted
    _share(facts, "acceptance", accepted, drafted)
    if (drafts := seen.total("drafts") or 0.0) > 0:
        facts["acceptance_length"] = 1 + accepted / drafts
        add_survival(facts, seen.survival())


def add_survival(facts: dict[str, Value], survival: list[float]) -> None:
    """Add draft length, and survival at the first and last position."""
    if survival:
        facts["draft_length"] = float(len(survival))
        facts["first_survival"] = min(1.0, survival[0])
        facts["last_survival"] = min(1.0, survival[-1])
