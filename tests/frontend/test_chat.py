"""``LLM.chat``: tools, variables of the template, streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.errors import RequestError

TALK: Any = [{"role": "user", "content": "for word"}]
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{{ mood }}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> LLM:
    made = LLM(tiny_llama, drafter=None)
    assert made.inputs.codec is not None
    made.inputs.codec.chat_template = TEMPLATE
    return made


def test_tools_and_variables_reach_the_template(llm: LLM) -> None:
    (plain,) = llm.chat(TALK, SHORT)
    assert llm.decode(plain.prompt_token_ids) == "for word"
    (told,) = llm.chat(TALK, SHORT, tools=TOOLS, chat_template_kwargs={"mood": "glad "})
    assert llm.decode(told.prompt_token_ids) == "add;glad for word"


def test_a_stream_gives_the_same_tokens(llm: LLM) -> None:
    both: Any = [TALK, [{"role": "user", "content": "the dog"}]]
    whole = llm.chat(both, SHORT)
    told: dict[int, list[int]] = {0: [], 1: []}
    for event in llm.stream_chat(both, SHORT):
        if event.token_id is not None:
            told[event.prompt_index].append(event.token_id)
    assert [told[0], told[1]] == [output.outputs[0].token_ids for output in whole]


def test_what_is_left_out_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="empty"):
        llm.chat([[]], SHORT)


def test_log_probabilities_of_all_tokens(llm: LLM) -> None:
    all_of_them = SamplingParams(temperature=0, max_tokens=3, logprobs=-1, prompt_logprobs=-1)
    (output,) = llm.generate("for word", all_of_them)
    size = llm.inputs.vocab_size
    assert output.prompt_logprobs is not None
    for each in (*(output.outputs[0].logprobs or ()), *output.prompt_logprobs[1:]):
        assert each is not None
        assert len(each) == size
        assert sorted(p.rank for p in each.values()) == [*range(1, size + 1)]
        assert abs(sum(2.718281828459045**p.logprob for p in each.values()) - 1) < 1e-3
    assert len(output.outputs[0].logprobs or ()) == 3
