"""The playground in a real browser; skipped where Chromium and its driver are not installed."""

import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import outrider
from tests.support.forked import Served

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
def chooses(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose engine chooses how to draft, and which records."""
    with Served(tiny_llama, "--record", tmp_path_factory.mktemp("recorded")) as found:
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


def test_users_see_that_prompts_are_recorded(page, chooses) -> None:
    assert not at(page, "#recording").is_displayed()
    page.get(chooses.url)
    until(page, lambda: at(page, "#recording").is_displayed())
    assert "records prompts, to train" in at(page, "#recording").text


def test_a_panel_shows_what_the_engine_believes(browser, chooses) -> None:
    browser.set_window_size(1200, 900)
    browser.get(chooses.url)
    until(browser, lambda: at(browser, "#beliefs").is_displayed())
    assert at(browser, "#drafter").get_attribute("value") == "auto"
    assert at(browser, "#length").get_attribute("value") == ""
    fill(browser, "#max_tokens", "120")
    at(browser, "#run").click()
    until(browser, lambda: "tokens in" in at(browser, "#message").text)
    until(browser, lambda: all_at(browser, "#survival li"))
    assert at(browser, "#choices").text.startswith(("Chosen: ", "Drafting pauses"))
    for name in ("chosen", "plain"):
        assert int(at(browser, f"#expected-{name}").text) > 0
    for row in all_at(browser, "#survival li"):
        bars = row.find_element("css selector", ".bars")
        label = bars.get_attribute("aria-label")
        assert label.startswith(row.find_element("css selector", ".name").text.strip("✓ "))
        assert label.count("%") == len(bars.find_elements("css selector", "i")) == 8
    browser.set_window_size(360, 740)
    wide = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert browser.execute_script(wide) <= 0


def test_without_choices_there_is_no_panel(page) -> None:
    assert not at(page, "#beliefs").is_displayed()
    assert at(page, "#length").get_attribute("value") == "4"


@pytest.mark.parametrize(
    ("choices", "paused", "said"),
    [
        ([], False, "Chosen: nothing yet"),
        ([("model tree", 6, 2), ("none", 0, 1)], False,
         "Chosen: model tree, 6 deep (2) · plain decoding (1)"),
        ([("suffix", 3, 1), ("suffix", 3, 4)], False, "Chosen: suffix, 3 deep"),
        ([("suffix", 3, 1)], True, "Drafting pauses, since it lost time."),
    ],
)  # fmt: skip
def test_the_panel_says_who_drafts(page, choices, paused: bool, said: str) -> None:
    """From an answer that is made up, as the page reads it after a run."""
    known = {
        "choices": [{"method": m, "depth": d, "sequences": n} for m, d, n in choices],
        "paused": paused, "tokens_per_second": 12.4, "plain_tokens_per_second": 6.0,
        "survival": {"suffix": {"survival": [0.5, 0.25]}},
    }  # fmt: skip
    page.execute_script(
        "const [known, real] = [arguments[0], window.fetch];"
        "window.fetch = async (path, ...rest) => path === 'v1/speculation'"
        " ? new Response(JSON.stringify({ controller: known })) : real(path, ...rest);",
        known,
    )
    fill(page, "#max_tokens", "4")
    at(page, "#run").click()
    until(page, lambda: at(page, "#choices").text == said)
    assert at(page, "#expected-chosen").text == "12"
    drafts = not paused and any(method == "suffix" for method, _, _ in choices)
    assert len(all_at(page, "#survival .chosen")) == drafts
    bars = all_at(page, "#survival .bars i")
    assert [bar.get_attribute("title") for bar in bars] == ["depth 1: 50 %", "depth 2: 25 %"]


POSTS = (
    "const real = window.fetch; window.posts = 0;"
    "window.fetch = (path, options) => { window.posts += options?.method === 'POST';"
    " return real(path, options); };"
)


def test_no_key_and_no_button_passes_by_what_the_form_asks_for(page) -> None:
    page.execute_script(POSTS)
    for field, wrong, right in (("max_tokens", "0", "4"), ("temperature", "", "0.75"),
                                ("seed", "x1", "1"), ("length", "99999", "4")):  # fmt: skip
        fill(page, f"#{field}", wrong)
        at(page, "#prompt").send_keys("\ue009" + "\ue007")  # Control and Enter
        at(page, "#race").click()
        at(page, "#run").click()
        assert page.execute_script("return [window.posts, document.activeElement.id]") == [0, field]
        assert not at(page, "#stop").is_enabled()
        fill(page, f"#{field}", right)
    at(page, "#prompt").send_keys("\ue009" + "\ue007")
    until(page, lambda: "tokens in" in at(page, "#message").text)
    assert page.execute_script("return window.posts") == 1


class Ends(ThreadingHTTPServer):
    """A server of the page that can end and come back; its streams break off."""

    daemon_threads = True
    allow_reuse_address = True

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            files = Path(outrider.__file__).parent / "server" / "playground"
            speculation = {"enabled": True, "drafter": "ngram", "drafters": {"ngram": {}},
                           "num_speculative_tokens": 2, "max_num_speculative_tokens": 8,
                           "controller": None}  # fmt: skip
            known = {"/v1/models": {"data": [{"id": "stub", "max_model_len": 9}]},
                     "/v1/speculation": speculation, "/health": {}}  # fmt: skip
            name = self.path.rpartition("/")[2] or "index.html"
            found = known.get(self.path)
            body = (files / name).read_bytes() if found is None else json.dumps(found).encode()
            kind = {"html": "text/html", "js": "text/javascript"}.get(
                name.rpartition(".")[2], "x/x"
            )
            self.reply(200, kind, body, len(body))

        def do_POST(self) -> None:
            token = {"id": 1, "text": "first", "origin": "plain"}
            step = {"tokens": [token], "rejected": []}
            body = f"data: {json.dumps({'choices': [{'speculation': step}]})}\n\n".encode()
            if self.server.proxied:  # type: ignore[attr-defined]
                self.reply(502, "text/html", b"<h1>Bad Gateway</h1>", 20)
            else:
                self.reply(200, "text/event-stream", body, len(body) + self.server.missing)  # type: ignore[attr-defined]

        def reply(self, status: int, kind: str, body: bytes, length: int) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    def __init__(self, port: int) -> None:
        self.missing, self.proxied = 9, False
        super().__init__(("127.0.0.1", port), self.Handler)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def end(self) -> int:
        self.shutdown()
        self.server_close()
        return int(self.server_port)


def test_the_page_says_that_the_server_is_gone_and_back(browser) -> None:
    def ends_with(words: str) -> None:
        until(browser, lambda: words in at(browser, "#message").text)
        assert "bad" in at(browser, "#message").get_attribute("class")
        assert "fetch" not in at(browser, "#message").text.lower()

    server = Ends(0)
    browser.get(f"http://127.0.0.1:{server.server_port}")
    until(browser, lambda: "stub" in at(browser, "#model").text)
    server.proxied = True
    at(browser, "#run").click()
    ends_with("HTTP 502 Bad Gateway")
    server.proxied, server.missing = False, 0
    at(browser, "#run").click()
    ends_with("broke off before its end")
    assert "stub" in at(browser, "#model").text
    server.missing = 9
    at(browser, "#run").click()
    ends_with("does not answer")  # in the middle of a stream
    until(browser, lambda: "is back" in at(browser, "#message").text)
    assert "stub" in at(browser, "#model").text
    port = server.end()
    until(browser, lambda: "does not answer" in at(browser, "#message").text)  # by itself
    assert f"127.0.0.1:{port}" in at(browser, "#message").text
    assert at(browser, "#model").text == "not connected"
    for button in ("#run", "#race"):
        at(browser, button).click()
        ends_with("does not answer")
    server = Ends(port)
    until(browser, lambda: "stub" in at(browser, "#model").text)
    assert at(browser, "#message").text == "The server is back."
    browser.get("about:blank")  # else the page goes on asking
    server.end()
    browser.get_log("browser")  # reading empties it of what was broken here


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


TEMPLATE = """\
{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system prompt here') }}\
{% endif %}{{ m.role }}: {{ m.content }};{% endfor %}"""


@pytest.fixture(scope="module")
def talks(
    tiny_llama: Path, tiny_drafter: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """A server whose template takes the roles of users and models, and no system prompt."""
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    drafts = "--drafter", tiny_drafter, "--num-speculative-tokens", "4"
    with Served(tiny_llama, "--chat-template", template, *drafts) as found:
        yield found


@pytest.fixture
def talk(browser, talks):
    """The chat, empty, with a history of its own."""
    browser.set_window_size(1200, 900)
    browser.get(talks.url)
    until(browser, lambda: "context 256" in at(browser, "#model").text)
    at(browser, "#to-chat").click()
    assert at(browser, "#max_tokens").get_attribute("value") == "256"  # the whole context
    at(browser, "#options summary").click()
    fill(browser, "#max_tokens", "24")
    at(browser, "#ask").click()
    yield browser
    browser.execute_script("localStorage.clear()")
    browser.get("about:blank")


def said(page, text: str) -> None:
    """Send a message and wait for the end of its answer."""
    turns = len(all_at(page, ".turn.assistant"))
    at(page, "#ask").send_keys(text + "\n")
    until(page, lambda: len(all_at(page, ".turn.assistant")) == turns + 1)
    until(page, lambda: at(page, "#send").is_displayed())


def test_steps_of_one_packet_still_have_a_rate(talk) -> None:
    speeds = talk.execute_async_script(
        "const done = arguments[0]; import('/playground/api.js').then(({ Figures }) => {"
        "const of = (tokens, count, first, last) =>"
        "  Object.assign(new Figures(), { tokens, count, start: 0, first, last }).speed;"
        "done([of(8, 8, 20, 20), of(9, 8, 20, 120), of(1, 1, 20, 20), of(0, 0, null, null)]); });"
    )
    assert speeds == [400, 80, 0, 0]


def test_a_chat_and_what_is_kept_of_it(talk) -> None:
    said(talk, "for word")
    said(talk, "again")
    figures = [each.text for each in all_at(talk, ".assistant .figures")]
    assert len(figures) == 2
    for each in figures:
        assert "tokens/s" in each
        assert "of drafts accepted" in each
        assert "first token" in each
    assert not at(talk, ".assistant .do-again").is_displayed()  # the last answer alone
    texts = [each.text for each in all_at(talk, ".turn .content")]
    (row,) = all_at(talk, "#chats .open")
    assert row.text == "for word"
    at(talk, "#new").click()
    assert not all_at(talk, ".turn")
    said(talk, "another")
    assert [each.text for each in all_at(talk, "#chats .open")] == ["another", "for word"]
    talk.refresh()
    until(talk, lambda: len(all_at(talk, "#chats .open")) == 2)
    all_at(talk, "#chats .open")[1].click()
    assert [each.text for each in all_at(talk, ".turn .content")] == texts
    assert not at(talk, ".assistant .do-race").is_enabled()  # its call is not kept
    all_at(talk, "#chats .drop")[1].click()
    assert not all_at(talk, ".turn")
    assert [each.text for each in all_at(talk, "#chats .open")] == ["another"]


def test_the_history_and_the_system_prompt_are_sent(talk) -> None:
    talk.execute_script(
        "const real = window.fetch; window.bodies = [];"
        "window.fetch = (path, options) => { if (options?.method === 'POST')"
        " window.bodies.push(JSON.parse(options.body)); return real(path, options); };"
    )
    at(talk, "aside details:last-child summary").click()
    fill(talk, "#system", "Be brief.")
    at(talk, "#ask").send_keys("one\ue008\n\ue000two\n")  # Shift and Enter between
    until(talk, lambda: at(talk, "#send").is_displayed() and at(talk, "#message").text)
    assert "no system prompt here" in at(talk, "#message").text
    fill(talk, "#system", " ")
    said(talk, "three")
    first, second = talk.execute_script("return window.bodies")
    assert [m["role"] for m in first["messages"]] == ["system", "user"]
    assert first["messages"][1]["content"] == "one\ntwo"
    assert [m["content"] for m in second["messages"]] == ["three"]  # in the failed one's place
    assert second["max_tokens"] == 24
    assert "seed" not in second
    assert len(all_at(talk, ".turn.user")) == 1


def test_tokens_and_the_race_of_an_answer(talk) -> None:
    fill(talk, "#seed", "1")
    said(talk, "for word")
    answer = at(talk, ".turn.assistant")
    text = answer.find_element("css selector", ".content").text
    answer.find_element("css selector", ".do-tokens").click()
    tokens = answer.find_elements("css selector", ".tokens .token")
    figures = answer.find_element("css selector", ".figures").text
    assert figures.startswith(f"{len(tokens)} tokens · ")
    assert {one.get_attribute("title") for one in tokens} <= {"accepted", "bonus", "plain"}
    answer.find_element("css selector", ".do-tokens").click()
    assert answer.find_element("css selector", ".content").text == text
    answer.find_element("css selector", ".do-race").click()
    verdict = answer.find_element("css selector", ".verdict")
    until(talk, lambda: verdict.get_attribute("data-equal") == "true")
    assert "Both texts are equal" in verdict.text
    answer.find_element("css selector", ".do-again").click()
    until(talk, lambda: at(talk, "#send").is_displayed())
    assert len(all_at(talk, ".turn.assistant")) == 1


def test_an_answer_is_stopped_and_stays(talk) -> None:
    fill(talk, "#max_tokens", "240")
    at(talk, "#ask").send_keys("for word")
    talk.execute_script(
        "document.getElementById('composer').requestSubmit();"
        "document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))"
    )
    until(talk, lambda: at(talk, "#message").text == "stopped")
    assert at(talk, "#send").is_displayed()


MARKDOWN = """\
# Head <script>window.broken = 1</script>

A *b* **c** `d <i>` [safe](https://example.com/a?b=1) [bad](javascript:window.broken=1)
![x](https://example.com/x.png) <img src=x onerror="window.broken = 1">

- one
  - two
1. three

> quoted

| a | b |
|---|---|
| 1 | `2` |

```html
<b>code</b>
```
"""


def test_markdown_is_no_html(page) -> None:
    page.execute_async_script(
        "const done = arguments[1]; import('/playground/markdown.js').then(({ rendered }) => {"
        " const box = document.createElement('div'); box.id = 'box';"
        " box.append(...rendered(arguments[0])); document.body.append(box); done(); });",
        MARKDOWN,
    )
    for css, text in (
        ("h3", "Head <script>window.broken = 1</script>"), ("em", "b"), ("strong", "c"),
        ("p code", "d <i>"), ("ul > li > ul > li", "two"), ("ol > li", "three"),
        ("blockquote", "quoted"), ("td code", "2"), ("pre code", "<b>code</b>"),
        (".code-bar span", "html"),
    ):  # fmt: skip
        assert at(page, f"#box {css}").text == text, css
    (link,) = all_at(page, "#box a:not([href*='x.png'])")
    assert link.get_attribute("href") == "https://example.com/a?b=1"
    assert "noopener" in link.get_attribute("rel")
    assert not all_at(page, "#box img, #box script, #box i, #box b")
    assert page.execute_script("return window.broken") is None
    assert "[bad](javascript:window.broken=1)" in at(page, "#box").text


def test_a_model_that_chats_opens_in_the_chat(tiny_llama: Path, tmp_path: Path, browser) -> None:
    folder = tmp_path / "tiny-instruct"
    shutil.copytree(tiny_llama, folder)
    (folder / "generation_config.json").write_text('{"temperature": 0.25, "top_p": 0.5}')
    with Served(folder) as server:
        browser.get(server.url)
        until(browser, lambda: at(browser, "#chat").is_displayed())
        assert browser.execute_script("return document.activeElement.id") == "ask"
        for name, value in (("temperature", "0.25"), ("top_p", "0.5"), ("max_tokens", "256")):
            assert at(browser, f"#{name}").get_attribute("value") == value
        browser.set_window_size(360, 740)
        at(browser, "#ask").send_keys("x" * 99 + "\n")
        until(browser, lambda: all_at(browser, ".turn.assistant"))
        wide = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert browser.execute_script(wide) <= 0
        browser.execute_script("localStorage.clear()")
        browser.get("about:blank")
