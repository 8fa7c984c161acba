"""Thoughts are told from answers, streamed as whole."""

import pytest

from outrider.text.reasoning import CHANNELS, FORMS, ChannelCall, Parts, form_of

QWEN, GPT = FORMS["qwen3"], FORMS[CHANNELS]
FINAL = "<|start|>assistant<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'


def streamed(name: str, text: str, begun: bool = False) -> Parts:
    """The parts of a text, which only grow while it comes."""
    form, shown = FORMS[name], Parts("", "")
    for end in range(len(text) + 1):
        parts = form.parts(text[:end], begun, False)
        assert parts.thoughts.startswith(shown.thoughts), text[:end]
        assert parts.answer.startswith(shown.answer), text[:end]
        shown = parts
    whole = form.parts(text, begun, True)
    assert whole.thoughts.startswith(shown.thoughts)
    assert whole.answer.startswith(shown.answer)
    return whole


@pytest.mark.parametrize("name", [name for name in FORMS if name != CHANNELS])
def test_marks_part_thoughts_and_answer(name: str) -> None:
    opening, closing = str(FORMS[name].opening), str(FORMS[name].closing)
    written = f"so {closing[:-1]} it is\n{closing}\n\nYes {opening} no"
    parts = streamed(name, f"\n{opening}\n{written}")
    assert parts[:2] == (f"so {closing[:-1]} it is", f"Yes {opening} no")
    assert streamed(name, written, begun=True)[:2] == parts[:2]
    assert streamed(name, f"{opening}{written}", begun=True)[:2] == parts[:2]
    assert streamed(name, written) == Parts("", written)
    assert streamed(name, f"{opening} so") == Parts("so", "", len(opening) + 3)
    assert streamed(name, "so on", begun=True) == Parts("so on", "", 5)
    assert streamed(name, opening[:-1]) == Parts("", opening[:-1])


def test_a_prompt_tells_whether_thoughts_come() -> None:
    assert QWEN.begun("<|im_start|>assistant\n<think>\n")
    assert not QWEN.begun("<think>\n\n</think>\n\n")
    assert QWEN.ended("<think>\n\n</think>\n\n")
    assert not QWEN.ended("<|im_start|>user\n</think><|im_end|>\n<|im_start|>assistant\n")
    assert QWEN.unclosed("<think>so far")
    assert not QWEN.unclosed("<think>so</think> it")
    assert not any(f("<|start|>assistant") for f in (GPT.begun, GPT.ended, GPT.unclosed))


def test_channels() -> None:
    text = f"<|channel|>analysis<|message|>so <x>\n<|end|>{FINAL}Yes"
    assert streamed(CHANNELS, text) == Parts("so <x>\n", "Yes", text.index("<|channel|>final"))
    assert streamed(CHANNELS, text + "<|return|>")[:2] == ("so <x>\n", "Yes")
    both = streamed(CHANNELS, f"<|channel|>analysis<|message|>so<|end|><|start|>assistant{CALL}")
    assert both.thoughts == "so"
    assert both.calls == (ChannelCall("f", '{"a": 1}', True),)
    before = streamed(CHANNELS, " to=functions.g.h<|channel|>commentary json<|message|>{}")
    assert before.calls == (ChannelCall("g.h", "{}", False),)
    told = "<|channel|>commentary<|message|>I shall look.<|end|><|start|>assistant" + CALL
    assert streamed(CHANNELS, told).answer == "I shall look."
    apart = (
        "<|channel|>analysis<|message|>T<|end|>\n<|start|>assistant<|channel|>final<|message|>Hi"
    )
    assert streamed(CHANNELS, apart)[:2] == ("T", "Hi")
    behind = "Sure.<|channel|>final<|message|>Hi"
    assert streamed(CHANNELS, behind) == Parts("", behind)
    assert streamed(CHANNELS, '{"plain": "json"}') == Parts("", '{"plain": "json"}')
    twice = f"<|channel|>analysis<|message|>a<|end|><|start|>assistant{text}"
    assert streamed(CHANNELS, twice).thoughts == "a\nso <x>\n"


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<think>' }}{{ '</think>' }}", "deepseek_r1"), ("[THINK] [/THINK]", "mistral"),
        ("content.split('</think>')[-1]", "deepseek_r1"), ("no thoughts", None), ("", None),
        ("<|start|>assistant<|channel|>analysis<|message|>", CHANNELS),
        ("Here is my response:", "granite"), ("<seed:think></seed:think>", "seed_oss"),
    ],
)  # fmt: skip
def test_the_form_follows_the_template(template: str, name: str | None) -> None:
    assert form_of(template) == (FORMS[name] if name else None)
