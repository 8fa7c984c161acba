"""Draws the pictures of the docs: ``python -m dev.pictures MODEL [NAME...]``.

MODEL is a checkpoint that chats, for the playground; the others show the pocket pair. Without names
all are drawn. They need Chromium with its driver and Prometheus
(``apt-get install chromium chromium-driver prometheus``).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import Request, urlopen

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.wait import WebDriverWait

from benchmarks.drill.panels import ELSEWHERE, filled
from benchmarks.served import Served
from outrider.ops.alerts.rules import read_data

from .terminal import picture, said

IMAGES = Path(__file__).parents[1] / "docs" / "images"
GENERATE = (
    "generate", "--seed", "3", "--max-tokens", "64", "--num-speculative-tokens", "4",
    "--prompt", "class Token:\n    def __init__(self, name, value):\n        self",
)  # fmt: skip
BENCH = "bench", "--drafter", "ngram,auto", "--temperature", "0"
ASKED = "Write Python code that prints the squares of 1, 2, 3, 4 and 5, one print for each."
WIDE = 116
"""Columns of a report of bench."""
SECONDS = 120
SEED = "3"
PORT = 9471
"""Of Prometheus, which keeps what the dashboard shows."""
CLIENTS = (1, 25), (8, 25), (1, 25)
"""The load of the dashboard's picture: clients, and for how many seconds."""
WINDOW = 5.0
"""Seconds of the dashboard's rates."""
COLUMNS = 4
UNITS = {"s": "seconds", "currencyUSD": "US dollars"}


def demo(_: str) -> None:
    """Draw ``outrider demo``, as it was written."""
    (IMAGES / "demo.svg").write_text(picture(said("demo"), moves=True), encoding="utf-8")


def generate(_: str) -> None:
    """Draw an output whose tokens have the colour of their origin."""
    (IMAGES / "generate.svg").write_text(picture(said(*GENERATE)), encoding="utf-8")


def explain(_: str) -> None:
    """Draw one step, token by token."""
    (IMAGES / "explain.svg").write_text(picture(said("explain")), encoding="utf-8")


def bench(_: str) -> None:
    """Draw a report of plain decoding beside drafters."""
    (IMAGES / "bench.svg").write_text(picture(said(*BENCH, columns=WIDE), WIDE), encoding="utf-8")


def playground(model: str) -> None:
    """Serve a model, ask it something, race its answer, and keep what the page shows."""
    options = ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(word)
    driver = Service(shutil.which("chromedriver"))
    with Served(model) as server, Chrome(options, driver) as page:
        page.set_window_size(1000, 800)
        page.get(server.url)
        wait = WebDriverWait(page, SECONDS)
        wait.until(lambda _: page.find_element("id", "ask").is_displayed())
        page.execute_script("document.getElementById('seed').value = arguments[0]", SEED)
        page.find_element("id", "ask").send_keys(f"{ASKED}\n")
        wait.until(lambda _: page.find_elements("css selector", ".assistant .figures:not(:empty)"))
        wait.until(lambda _: page.find_element("id", "send").is_displayed())
        page.find_element("css selector", ".assistant .do-race").click()
        wait.until(lambda _: page.find_elements("css selector", ".assistant .verdict[data-equal]"))
        page.execute_script("document.getElementById('beliefs').remove(); scrollTo(0, 0)")
        tall = page.execute_script("return document.documentElement.scrollHeight")
        page.set_window_size(1000, min(1100, tall + 150))
        time.sleep(0.5)
        page.save_screenshot(str(IMAGES / "playground.png"))


def dashboard(_: str) -> None:
    """Draw the panels of the Grafana dashboard, by their own queries, of a server under load."""
    with Served("pocket", "--slo", "ttft=200ms,tpot=50ms") as server, _prometheus(server) as known:
        begin = time.time()
        for clients, seconds in CLIENTS:
            _load(server, clients, time.monotonic() + seconds)
        panels = [panel for panel in _panels(known, begin, time.time()) if panel[1]]
    _draw(panels, begin)


@contextmanager
def _prometheus(server: Served) -> Iterator[str]:
    """A Prometheus that scrapes a server every second; yields its address."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "prometheus.yml"
        targets = server.url.removeprefix("http://")
        config.write_text(
            "global: {scrape_interval: 1s, scrape_timeout: 1s}\n"
            "scrape_configs:\n- job_name: outrider\n"
            f"  static_configs: [{{targets: ['{targets}']}}]\n"
        )
        command = [
            "prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{PORT}", "--log.level=error",
        ]  # fmt: skip
        with subprocess.Popen(command) as process:
            time.sleep(5)  # until it has scraped
            yield f"http://127.0.0.1:{PORT}"
            process.terminate()


def _load(server: Served, clients: int, until: float) -> None:
    """Have clients ask one call after another until a time."""

    def ask(seed: int) -> None:
        while time.monotonic() < until:
            body = {"prompt": "class Stack:\n", "max_tokens": 96, "seed": seed}
            sent = Request(
                f"{server.url}/v1/completions", json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )  # fmt: skip
            with urlopen(sent) as answer:
                answer.read()
            seed += clients

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


Panel = tuple[str, list[tuple[str, list[tuple[float, float]]]], str]
"""A title, the named lines of it with their points, and the unit."""


def _panels(prometheus: str, begin: float, end: float) -> Iterator[Panel]:
    for panel in json.loads(read_data("dashboard.json"))["panels"]:
        if panel["type"] == "row" or panel["title"] in ELSEWHERE:
            continue
        found = []
        for target in panel["targets"]:
            query = {"query": filled(target["expr"], WINDOW), "start": begin, "end": end, "step": 1}
            with urlopen(f"{prometheus}/api/v1/query_range?{urlencode(query)}") as answer:
                series: list[dict[str, Any]] = json.load(answer)["data"]["result"]
            for one in series:
                points = [(float(x), float(y)) for x, y in one["values"] if y != "NaN"]
                if points:
                    found.append((_named(target.get("legendFormat", ""), one["metric"]), points))
        yield panel["title"], found, panel["fieldConfig"]["defaults"].get("unit", "")


def _named(legend: str, labels: Mapping[str, str]) -> str:
    """Return the name of a line; there is one server, so that its address is left out."""
    for name, value in labels.items():
        legend = legend.replace(f"{{{{{name}}}}}", "" if name == "instance" else value)
    return legend.strip()


def _draw(panels: list[Panel], begin: float) -> None:
    from matplotlib.figure import Figure

    rows = -(-len(panels) // COLUMNS)
    figure = Figure((16, 2.6 * rows), layout="constrained")
    for place, (title, found, unit) in enumerate(panels, 1):
        axes = figure.add_subplot(rows, COLUMNS, place)
        for name, points in found:
            times = [x - begin for x, _ in points]
            values = [y for _, y in points]
            axes.plot(times, values, label=name if any(values) else None, linewidth=1.2)
        axes.set_title(f"{title}, {UNITS[unit]}" if unit in UNITS else title, fontsize=10)
        axes.set_ylim(bottom=0)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(fontsize=7, loc="best")
    figure.savefig(IMAGES / "dashboard.png", dpi=70)


PICTURES: dict[str, Callable[[str], None]] = {
    "demo": demo, "generate": generate, "explain": explain, "bench": bench,
    "playground": playground, "dashboard": dashboard,
}  # fmt: skip


def main(model: str, *names: str) -> None:
    """Draw the named pictures, or all."""
    for name in names or PICTURES:
        PICTURES[name](model)


if __name__ == "__main__":
    main(*sys.argv[1:])
