"""``outrider chat``: a conversation, and its commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.checkpoints.tokenizers import read_codec
from outrider.cli.chat import lines_of
from outrider.frontend.instruct import is_instruct
from outrider.pocket import PATH
from outrider.text.codec import TextCodec
from tests.support.commands import outrider

USED = ("--max-tokens", "8", "--temperature", "0")


def talk(*lines: str, model: object = PATH, more: tuple[str, ...] = USED) -> list[str]:
    """The lines that a conversation of ``lines`` shows."""
    done = outrider("chat", model, *more, input="".join(f"{line}\n" for line in lines))
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines()


def test_a_conversation() -> None:
    shown = talk("def add(a, b):", "/retry", "/quit", "never read")
    figures = [line for line in shown if "tokens/s" in line]
    assert len(figures) == 2
    first, again = "\n".join(shown).split(figures[0])[0], shown[shown.index(figures[0]) + 1 :]
    assert first.strip() in "\n".join(again)
    assert "8 tokens" in figures[0]
    assert "cut off by max_tokens" in figures[0]


def test_the_history_reaches_the_model() -> None:
    alone = talk("x = 1")
    after = talk("def f():", "x = 1")
    assert alone[0] != after[-2]
    assert talk("def f():", "/new", "x = 1")[-len(alone) :][:-1] == alone[:-1]
    assert "a new conversation" in talk("/system Be brief.", "x = 1")


def test_a_race_shows_the_same_text_twice() -> None:
    shown = talk("def add(a, b):", "/race", more=("--max-tokens", "24", "--seed", "3"))
    assert shown[-1].startswith("identical: yes · ")
    assert "without drafts:" in shown
    assert "with drafts:" in shown


def test_options_are_set() -> None:
    shown = talk("/set temperature 0.5", "/set drafter none", "/set k 2", "/set top_k 7", "/set")
    assert {"temperature 0.5", "drafter none", "k 2", "top_k 7", "max_tokens 8"} <= {*shown}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/nope", "there is no command /nope; /help lists all."),
        ("/set temperature", "give a name and a value, as in /set temperature 0.2."),
        ("/set temperature hot", "temperature is 'hot'; give a number"),
        ("/set temperature -1", "temperature is -1"), ("/set k x", "k is 'x'; give a whole number"),
        ("/set k -1", "num_speculative_tokens"), ("/set warmth 1", "no option 'warmth'"),
        ("/set temperature '", "the command cannot be read"), ("/retry", "no message to answer"),
        ("/race", "no answer to race with"), ("/set drafter nope", "nope"),
    ],
)  # fmt: skip
def test_mistakes_are_told_and_nothing_is_lost(line: str, said: str) -> None:
    shown = talk(line, "def add(a, b):")
    assert said in shown[0]
    assert "8 tokens" in shown[-1]


def test_a_message_that_is_too_long_is_taken_back() -> None:
    shown = talk("x " * 9000, "def add(a, b):")
    assert "longer than the model's context" in shown[0]
    assert "8 tokens" in shown[-1]


def test_lines_go_on_behind_a_backslash() -> None:
    assert [*lines_of(["a\\\n", "b\n", "c\n", "d\\\n"])] == ["a\nb", "c", "d"]


def test_a_model_without_a_template_does_not_chat(tmp_path: Path, tiny_qwen2: Path) -> None:
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(tiny_qwen2, folder)
    for name in ("chat_template.jinja", "chat_template.json"):
        (folder / name).unlink(missing_ok=True)
    done = outrider("chat", folder, input="x\n")
    assert done.exit_code == 2
    assert "has no chat template; continue texts with outrider generate." in done.output


@pytest.mark.parametrize(
    ("name", "chats"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", True), ("Qwen3-4B-Instruct-2507", True),
        ("gemma-3-1b-it", True), ("Llama-2-7b-chat-hf", True), ("DeepSeek-R1-Distill", True),
        ("gpt-oss-20b", True), ("Qwen2.5-Coder-0.5B", False), ("gemma-2b", False),
        ("pocket", False), ("Git-Model", False), ("QwQ-Thinking", True),
    ],
)  # fmt: skip
def test_names_of_models_that_chat(name: str, chats: bool, tmp_path: Path) -> None:
    codec = read_codec(PATH)
    folder = tmp_path / name.replace(".gguf", "")
    assert is_instruct(folder, codec) is chats
    bare = TextCodec(codec.backend, None, {}, 0, folder)
    assert not is_instruct(folder, bare)
    assert not is_instruct(folder, None)
