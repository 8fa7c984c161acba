"""The playground in a real browser; skipped where Chromium and its driver are not installed."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.served import Served

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

selenium = pytest.importorskip("selenium")
DRIVER, BROWSER = shutil.which("chromedriver"), shutil.which("chromium")
pytestmark = pytest.mark.skipif(
    not (DRIVER and BROWSER), reason="no browser: apt-get install chromium chromium-driver"
)
WAIT_SECONDS = 30


@pytest.fixture(scope="module")
def server(tiny_llama: Path, tiny_drafter: Path) -> Iterator[Served]:
    with Served(
        tiny_llama,
        "--drafter",
        tiny_drafter,
        "--num-speculative-tokens",
        "4",
        OUTRIDER_API_KEY="sesame",
    ) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator["Chrome"]:
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = BROWSER
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with Chrome(options, Service(DRIVER)) as found:
        found.implicitly_wait(0)
        yield found


def at(browser, css):
    return browser.find_element("css selector", css)


def all_at(browser, css):
    return browser.find_elements("css selector", css)


def until(browser, condition):
    from selenium.webdriver.support.wait import WebDriverWait

    return WebDriverWait(browser, WAIT_SECONDS).until(lambda _: condition())


def fill(browser, css, text):
    field = at(browser, css)
    field.clear()
    field.send_keys(text)


@pytest.fixture
def page(browser, server):
    """Opened, with the key given."""
    browser.set_window_size(1200, 900)
    browser.get(server.url)
    until(browser, lambda: "API key" in at(browser, "#message").text)
    fill(browser, "#key", "sesame\t")
    until(browser, lambda: "context 256" in at(browser, "#model").text)
    return browser


def test_tokens_show_where_they_came_from(page) -> None:
    fill(page, "#max_tokens", "60")
    at(page, "#prompt").send_keys("\ue009" + "\ue007")  # Control and Enter
    until(page, lambda: "tokens in" in at(page, "#message").text)
    kinds = {one.get_attribute("title") for one in all_at(page, ".token:not(.legend *)")}
    assert {"accepted", "bonus"} <= kinds
    assert len(all_at(page, ".steps i")) > 5
    for name in ("speed", "rate", "length", "ttft"):
        assert at(page, f"[data-figure={name}]").text != "–"
    rejected = all_at(page, ".token[data-rejected]")
    assert rejected
    shown = page.execute_script(
        "arguments[0].focus(); return getComputedStyle(arguments[0], '::after').content",
        rejected[0],
    )
    assert "rejected: " in shown


@pytest.mark.parametrize("mode", ["completion", "chat"])
def test_the_race_proves_that_texts_are_equal(page, mode: str) -> None:
    at(page, f"input[value={mode}]").click()
    at(page, "#race").click()
    until(page, lambda: at(page, "#message").get_attribute("data-equal"))
    assert "Both texts are equal" in at(page, "#message").text
    texts = [one.text for one in all_at(page, ".lane .text")]
    assert len(texts) == 2
    assert texts[0] == texts[1] != ""
    assert not page.find_elements("css selector", ".lane:first-child .accepted")


def test_escape_stops(page) -> None:
    fill(page, "#max_tokens", "240")
    page.execute_script(
        "document.getElementById('race').click();"
        "document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))"
    )
    until(page, lambda: at(page, "#message").text == "stopped")
    assert not at(page, "#stop").is_enabled()
    assert not at(page, "#message").get_attribute("data-equal")


def test_it_fits_a_phone_and_needs_nothing_from_elsewhere(page, server) -> None:
    page.set_window_size(360, 740)
    at(page, "#run").click()
    until(page, lambda: "tokens in" in at(page, "#message").text)
    wide = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.execute_script(wide) <= 0
    asked = page.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert asked
    assert all(one.startswith(server.url) for one in asked)
    bad = [
        e for e in page.get_log("browser") if e["level"] == "SEVERE" and "401" not in e["message"]
    ]
    assert not bad
    for scheme, dark in (("light", False), ("dark", True)):
        page.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
        )
        ground = page.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, ground[4:-1].split(","))) < 300) == dark
