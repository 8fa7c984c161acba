"""``outrider ops alerts``: metrics of any engine under one schema, alert rules, a dashboard."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import typer

from ..errors import ConfigError
from .common import Advised, ApiKey, on_sigterm, write
from .diagnose import pairs
from .flags import argument, setting
from .spelling import App

app = App()
UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
LEAST, MOST = 0.1, 3600.0


@app.callback()
def alerts() -> None:
    """Watch Outrider, vLLM, SGLang, TensorRT-LLM or llama.cpp: exporter, alerts, dashboard."""


def seconds(text: str) -> float:
    """Return the seconds of a text such as 10s, 500ms or 1m."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h)?", text.strip())
    amount = float(match[1]) * UNITS[match[2] or "s"] if match else 0.0
    if not LEAST <= amount <= MOST:
        raise typer.BadParameter(f"{text!r} is not a time from 100ms to 1h; give one such as 10s.")
    return amount


@app.command()
def exporter(
    url: str = argument("URL", "The engine's address."),
    port: int = setting(9090, "Port of the metrics.", min=0, max=65_535),
    host: str = setting("127.0.0.1", "Address to listen on."),
    interval: str = setting("10s", "Time between two looks at the engine.", metavar="TIME"),
    standby: str | None = setting(
        None, "The model without speculation, for the speedup.", metavar="URL"
    ),
    baseline: Path | None = setting(
        None,
        "A recording of the model without speculation, for the speedup: of outrider "
        "diagnose --save or bench serve.",
        metavar="FILE",
    ),
    compat_names: bool = setting(
        False, "Add gauges by the names that older guides use.", "--compat-names"
    ),
    api_key: ApiKey = None,
) -> None:
    """Republish an engine's metrics under one schema, until stopped."""
    from prometheus_client import CollectorRegistry, start_http_server

    from ..base.outside.sockets import is_local
    from ..ops.alerts.exporter import Exporter, Watcher, read_baseline
    from ..ops.diagnose.endpoint import Endpoint
    from ..ops.diagnose.host import gpus

    def say(line: str) -> None:
        typer.echo(line, err=True)

    every = seconds(interval)
    recorded = None if baseline is None else read_baseline(baseline)
    watched = Watcher(Endpoint(url, api_key), every, say)
    other = None if standby is None else Watcher(Endpoint(standby, api_key), every, say)
    registry = CollectorRegistry()
    here = gpus if is_local(watched.endpoint.host) else None
    registry.register(Exporter(watched, other, recorded, here, compat_names))
    stopped = threading.Event()
    with on_sigterm(lambda *_: stopped.set()):
        try:
            server, thread = start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or str(error)
            where = f"--host {host} --port {port}"
            raise ConfigError(f"cannot listen on {where}: {why}; choose others.") from None
        try:
            say(f"metrics at http://{host}:{server.server_port}/metrics")
            for watcher in filter(None, (watched, other)):
                threading.Thread(target=watcher.run, args=(stopped,), daemon=True).start()
            stopped.wait()
        finally:
            stopped.set()
            server.shutdown()
            thread.join()
            server.server_close()


@app.command()
def rules(
    form: str = setting(
        "prometheus", "prometheus, or kubernetes for a PrometheusRule.", "--format"
    ),
    latency: str = setting("e2e", "The latency whose P99 alerts: e2e or ttft."),
    advice: Advised = None,
    set_: list[str] | None = setting(None, "Another threshold.", "--set", metavar="NAME=VALUE"),
) -> None:
    """Print the alert rules, with runbooks, for Prometheus or its operator."""
    from ..ops.alerts.rules import break_even_of, render, thresholds

    even = None if advice is None else break_even_of(advice)
    others = pairs(set_ or [], "--set")
    write(render(form, latency, even, others))
    if even is not None:
        limits = thresholds(others)
        typer.echo(
            f"OutriderAcceptanceBelowBreakEven warns below {even:.3g}, as advised. "
            f"OutriderAcceptanceLow still fires below {limits['acceptance_warning']:g} and "
            f"{limits['acceptance_critical']:g} unless the speedup is known to be 1 or more; "
            "change these thresholds with --set acceptance_warning=... and --set "
            "acceptance_critical=...",
            err=True,
        )


@app.command()
def dashboard() -> None:
    """Print Grafana's dashboard: JSON to import or provision."""
    from ..ops.alerts.rules import read_data

    write(read_data("dashboard.json"))
