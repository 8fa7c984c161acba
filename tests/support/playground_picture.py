"""Draws the picture of the playground: ``python -m tests.support.playground_picture MODEL OUT``.

It needs Chromium and its driver, and a model that chats.
"""

import shutil
import sys
import time

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.wait import WebDriverWait

from benchmarks.served import Served

ASKED = "How do I reverse a string in Python? One line, please."
SECONDS = 120
SEED = "3"


def main(model: str, out: str) -> None:
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
        page.save_screenshot(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
