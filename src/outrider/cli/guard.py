"""``outrider ops guard``: watches an engine, drafts less, moves its traffic to a standby."""

from __future__ import annotations

import json
import logging
import signal
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from ..base.outside.text import printable
from ..errors import ConfigError
from ..ops.guard.decide import FORCIBLE
from ..ops.guard.judge import DOWN
from ..ops.guard.policy import SIGNALS, read
from ..ops.guard.store import LONGEST_EVENT, GuardStore
from .common import AsJson, write, write_json
from .flags import argument, setting
from .spelling import App

app = App()
PolicyFile = Annotated[
    Path, typer.Option("--policy", metavar="FILE", help="The policy, a TOML file.")
]


@app.callback()
def guard() -> None:
    """Watch an engine; if it fails, draft less or switch to a standby, and return."""


@app.command()
def run(
    policy: PolicyFile,
    dry_run: bool = setting(False, "Decide and report without acting.", "--dry-run"),
    json_: AsJson = False,
) -> None:
    """Run the guard until it is interrupted; what it changed stays as it is."""
    from ..ops.guard.loop import Guard, GuardStop

    chosen = read(policy)
    if dry_run:
        chosen = replace(chosen, dry_run=True)
    form = '{"time": "%(asctime)s", "level": "%(levelname)s", "text": %(text)s}'
    handler = logging.StreamHandler()
    handler.setFormatter(_Json(form) if json_ else logging.Formatter("%(asctime)s %(message)s"))
    logger = logging.getLogger("outrider.guard")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    stop = GuardStop()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop.ask)
    logger.info("watching %s every %g s", chosen.engine.url, chosen.interval)
    Guard(chosen, stop=stop).run()


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        record.text = json.dumps(record.getMessage(), ensure_ascii=False)
        return super().format(record)


@app.command()
def status(policy: PolicyFile, json_: AsJson = False) -> None:
    """Show the state, each signal with its reason, and what is wrong."""
    chosen = read(policy)
    seen = GuardStore(chosen.folder, create=False).status()
    if seen is None:
        raise ConfigError(f"No guard has run in {chosen.folder}; start outrider ops guard run.")
    age, seen["stale"] = time.time() - seen["time"], _stale(seen, chosen.interval)
    if json_:
        write_json(seen, "-")
        return
    lines = [f"state    {_line(seen['mode'])}", f"engine   {_line(seen['engine'])}"]
    if seen["stale"]:
        lines.append(f"STALE    the last evaluation was {age:.0f} s ago; is the guard running?")
    if seen["forced"]:
        lines.append(
            f"forced   {_line(seen['forced'])}; outrider ops guard release lets the rules decide"
        )
    if seen["dry_run"]:
        lines.append("dry run  nothing is changed")
    if not seen["runtime_switch"]:
        lines.append("switch   this engine has none, so weak drafting moves traffic to the standby")
    reasons, alerts = sorted(seen["reasons"].items()), sorted(seen["alerts"].items())
    lines += [_reason(_line(name), _line(text)) for name, text in reasons]
    lines += [f"ALERT    {_line(name)}: {_line(text)}" for name, text in alerts]
    write("\n".join(lines) + "\n")


def _stale(seen: dict[str, Any], interval: float) -> bool:
    """Return True if the last evaluation is so old that no guard seems to run."""
    return bool(time.time() - seen["time"] > 3 * interval + 10)


def _reason(name: str, text: str) -> str:
    """Return the status line of a signal, or of something that the guard waits for."""
    kind = "signal" if name in SIGNALS or name == DOWN else "next"
    return f"{kind:<8} {text if text.startswith(f'{name} ') else f'{name}: {text}'}"


@app.command()
def history(
    policy: PolicyFile,
    json_: AsJson = False,
    last: int = setting(50, "Entries, the newest.", "--last", min=1),
) -> None:
    """Show what the guard did, and why."""
    entries = GuardStore(read(policy).folder, create=False).history(last)
    if json_:
        write_json(entries, "-")
        return
    write("".join(map(_entry, entries)))


def _line(text: object) -> str:
    return printable(text, LONGEST_EVENT)


def _entry(entry: dict[str, Any]) -> str:
    try:
        when = datetime.fromtimestamp(float(entry["time"]), UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    except (LookupError, TypeError, ValueError, OverflowError, OSError):
        when = "(no time)"
    what = entry.get("action") or entry.get("alert") or ""
    dry = " (dry run)" if entry.get("dry_run") else ""
    kind, text = _line(entry.get("kind", "")), _line(entry.get("text", ""))
    return f"{when}  {kind:<8} {_line(what):<14} {text}{dry}\n"


@app.command()
def force(
    policy: PolicyFile,
    mode: str = argument("MODE", f"{', '.join(FORCIBLE)}.", show_default=False),
) -> None:
    """Hold the guard in one state, until release; it obeys at its next evaluation."""
    if mode not in FORCIBLE:
        raise typer.BadParameter(f"mode is {mode!r}; known modes are {', '.join(FORCIBLE)}.")
    _leave(policy, mode)


@app.command()
def release(policy: PolicyFile) -> None:
    """Let the rules decide again; traffic returns by probation."""
    _leave(policy, None)


def _leave(policy: Path, mode: str | None) -> None:
    chosen = read(policy)
    store = GuardStore(chosen.folder)
    store.command(mode)
    try:
        seen = store.status()
    except ConfigError:
        seen = None
    if seen is None or _stale(seen, chosen.interval):
        typer.echo("warning: no guard is running; this takes effect when one starts.", err=True)
