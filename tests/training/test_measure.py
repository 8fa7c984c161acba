"""What is measured of a head stands in its config and its card, whatever these and prompts say."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from transformers import AutoConfig

from outrider.bench.record import Pass, run_all
from outrider.checkpoints.extras import KEY, MOST_MEASURED
from outrider.checkpoints.heads import read_head
from outrider.engine.build import load_target
from outrider.engine.setup import set_up
from outrider.errors import ConfigError
from outrider.native import choice as native
from outrider.training import served
from outrider.training.card import BEGIN, END
from outrider.training.measure import note
from outrider.training.served import Served, Serving
from tests.support.commands import outrider
from tests.support.heads import Eagle, make_head, save_head

SERVED = Served(0.0, 1.5, (1.4, 1.6), 0.25, [0.5], 9.0, 6.0, 1.5, [1.5, 1.5])


@pytest.fixture
def head(tiny_llama: Path, tmp_path: Path) -> Path:
    """A head of which as much was measured as a config may say."""
    row = {"use": "of others", "temperature": 0.5, "acceptance_length": 1.5, "prompts": 4}
    extra = {KEY: {"measured": [{**row, "data": "x", "machine": "|m|"}] * MOST_MEASURED}}
    about = make_head(Eagle(extra=extra), AutoConfig.from_pretrained(tiny_llama))
    return save_head(about, tmp_path / "head")


def test_what_is_noted_can_be_read_and_means_nothing_else(head: Path) -> None:
    card = head / "README.md"
    before, after = b"caf\xe9\n" + BEGIN.encode(), f"{END}\nthe end".encode()
    card.write_bytes(before + b"\nolder\n" + after)
    name = os.fsdecode(b"a|<b>\n[x](y)\x1b[31m\xff.jsonl")
    for _ in range(2):
        note(head, "chat", [SERVED, SERVED._replace(temperature=1.0)], "d" * 64, name)
    measured = read_head(head).extras.measured
    assert [each.use for each in measured] == ["of others"] * (MOST_MEASURED - 2) + ["chat"] * 2
    assert measured[-1].data == r"a|<b> [x](y)\x1b[31m\udcff.jsonl"
    text = card.read_bytes()
    assert text.startswith(before + b"\n| use |")
    assert text.endswith(after)
    assert b"older" not in text
    assert rb"4 of x (" in text
    assert rb"2 of a\|\<b\> \[x\](y)\\x1b\[31m\\udcff.jsonl (dddddddddddddddd) |" in text
    assert rb"\|m\|" in text


@pytest.mark.skipif(native.library() is None, reason="the native step is off")
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"prompt": "the lazy dog" * 100}, "tokens, and 128 more do not fit into the target's"),
        ({"prompt": ""}, "line 1: prompt is ''; give a text that is not empty."),
    ],
)
def test_prompts_that_cannot_be_measured(
    line: object, said: str, head: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps(line))
    words = ("--target", tiny_llama, "--prompts", f"chat={tmp_path / 'p.jsonl'}")
    done = outrider("train", "measure", head, *words)
    assert done.exit_code == 2
    assert said in done.output
    assert "--skip-bad" not in done.output


def test_outputs_of_one_token_have_no_speed(head: Path, tiny_llama: Path) -> None:
    setup = set_up(tiny_llama, None, {})
    model = load_target(setup.checkpoint, setup.config)
    serving = Serving(tiny_llama, model, [[5, 6, 7]], 1, 64)
    with pytest.raises(ConfigError, match="end with their first token"):
        serving.measure(head, 2, (0.0,), 1)


@pytest.mark.parametrize(("slow", "passes"), [(-1.0, 3), (1e9, 12)])
def test_plain_decoding_of_a_slow_target_is_timed_once(
    slow: float, passes: int, head: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For all drafters, whose speeds are over it; else each takes turns with it three times."""
    monkeypatch.setattr(served, "SLOW", slow)
    ran = list[Pass]()
    monkeypatch.setattr(served, "run_all", lambda *a: ran.append(run_all(*a)) or ran[-1])
    setup = set_up(tiny_llama, None, {})
    model = load_target(setup.checkpoint, setup.config)
    serving = Serving(tiny_llama, model, [[5, 6, 7], [8, 9]], 6, 64)
    found = [serving.measure(head, 2, [0.0])[0] for _ in range(2)]
    assert len(ran) == passes
    if slow < 0:
        plain = ran[0].speed
        assert found[0].plain_tokens_per_second == plain
        assert [each.speedup == each.tokens_per_second / plain for each in found] == [True] * 2
