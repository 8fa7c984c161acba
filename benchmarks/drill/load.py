"""A load of ``outrider bench serve`` in the background, and what its requests met."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import ConfigError

END_SECONDS = 60.0
TOKENS = 16


@dataclass(frozen=True)
class Sent:
    """One request: when it was sent (``time.perf_counter``), its seconds, and its error."""

    at: float
    seconds: float
    error: str


class Load(AbstractContextManager["Load", None]):
    """An open loop that runs until ``stop``."""

    def __init__(self, url: str, rate: float, report: Path) -> None:
        self._report = report
        self._process = subprocess.Popen(
            [
                sys.executable, "-m", "outrider", "bench", "serve", url, "--request-rate",
                f"{rate:g}", "--num-prompts", "1000000", "--max-tokens", str(TOKENS),
                "--temperature", "0", "--prompts", "code", "--completions", "--warm-up", "2",
                "--timeout", "60", "--detailed", "--out", str(report),
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()

    def stop(self, drain: float = 3.0) -> list[Sent]:
        """End the load as Ctrl-C does; the requests that ended, in order of their start."""
        time.sleep(drain)
        self._process.send_signal(signal.SIGINT)
        _, said = self._process.communicate(timeout=END_SECONDS)
        if not self._report.exists():
            raise ConfigError(f"the load gave no report: {said.strip()[-500:]}")
        run = json.loads(self._report.read_text(encoding="utf-8"))["runs"][0]
        sent = [
            Sent(at, ttft + sum(gaps), error)
            for at, ttft, gaps, error in zip(
                run["start_times"], run["ttfts"], run["itls"], run["errors"], strict=True
            )
        ]
        return sorted(sent, key=lambda one: one.at)


def p99(requests: list[Sent]) -> float:
    """Return the 99th percentile of the seconds of those that did not fail; NaN without any."""
    seconds = sorted(one.seconds for one in requests if not one.error)
    return seconds[max(0, math.ceil(0.99 * len(seconds)) - 1)] if seconds else math.nan
