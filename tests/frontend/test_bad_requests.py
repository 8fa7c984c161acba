"""A request that goes wrong fails alone, in words; and log probabilities, which are asked for."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from outrider import LLM, SamplingParams
from outrider.base.types import Draft, Request, SequenceState
from outrider.errors import ConfigError, GenerationError, RequestError
from outrider.frontend.outputs import RequestState
from outrider.sampling.pipeline import Logits, SequencePipeline
from outrider.text.detokenize import Detokenizer
from tests.support.pages import check_engine
from tests.support.tiny import build_checkpoint, byte_level_tokenizer

BASE = SamplingParams(temperature=0.8, max_tokens=8, seed=5, ignore_eos=True)
PROMPTS = ["the quick", "fox", "jumps over the"]


@pytest.fixture(scope="module", params=["none", "ngram", "model"])
def llm(request: pytest.FixtureRequest, tiny_llama: Path, tiny_drafter: Path) -> LLM:
    drafter = {"none": None, "ngram": "ngram", "model": tiny_drafter}[request.param]
    llm = LLM(tiny_llama, drafter, num_speculative_tokens=3, dtype="float32", memory=2**24)
    llm.engine.chooser.tries_plain = False  # a step without drafts has other origins
    return llm


def too_wide(ids: list[int], logits: Logits) -> Logits:
    return np.zeros(len(logits) + 1, np.float32)


def a_list(ids: list[int], logits: Logits) -> Any:
    return logits.tolist()


def raises(ids: list[int], logits: Logits) -> Logits:
    raise RuntimeError("no such table")


def not_a_number(ids: list[int], logits: Logits) -> Logits:
    return logits * np.float32(np.nan)


def too_large(ids: list[int], logits: Logits) -> NDArray[np.float64]:
    return logits.astype(np.float64) + 1e300


def of_torch(ids: list[int], logits: Logits) -> torch.Tensor:
    return torch.from_numpy(logits)


def nothing(ids: list[int], logits: Logits) -> Logits:
    return np.full_like(logits, -math.inf)


class Impure:
    def __init__(self) -> None:
        self.calls = itertools.count()

    def __call__(self, ids: list[int], logits: Logits) -> NDArray[np.float64]:
        return logits + next(self.calls) * np.arange(len(logits))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"logits_processors": [too_wide]}, r"\[0\] returned float32 \[321\]; it must"),
        ({"logits_processors": [a_list]}, r"logits_processors\[0\] returned list; it must return"),
        ({"logits_processors": [of_torch]}, r"returned Tensor; it must return a NumPy array of"),
        ({"logits_processors": [raises]}, "raised RuntimeError: no such table"),
        ({"logits_processors": [not_a_number]}, "returned NaN or infinity; ban a token with -inf"),
        ({"logits_processors": [too_large]}, "returned NaN or infinity; ban a token with -inf"),
        ({"logits_processors": [Impure()]}, "it must be a pure function"),
        ({"logits_processors": [nothing]}, "options leave no token to sample"),
        (
            {
                "structured_outputs": {"choice": ["a"]},
                "allowed_token_ids": [5],
                "ignore_eos": False,
            },
            "options leave no token to sample",
        ),
    ],
)
def test_a_failing_request_leaves_its_neighbours_alone(
    llm: LLM, options: dict[str, Any], sentence: str
) -> None:
    alone = [llm.generate(prompt, BASE)[0].outputs[0] for prompt in PROMPTS]
    bad = replace(BASE, **options)
    with pytest.raises(GenerationError, match=f"prompt 1 failed: .*{sentence}") as caught:
        llm.generate(PROMPTS, [BASE, bad, BASE])
    first, failed, last = (o.outputs[0] for o in caught.value.outputs)
    assert failed.finish_reason == "error"
    assert first == alone[0]
    assert last == alone[2]
    assert not llm.engine.has_work
    check_engine(llm.engine)
    assert llm.engine.scheduler.pool.num_free == llm.engine.scheduler.pool.num_usable


@pytest.mark.parametrize("form", [{"choice": ["the", "fox"]}, {"regex": "[a-d]{3}"}])
def test_a_form_completed_before_min_tokens_ends(llm: LLM, form: dict[str, Any]) -> None:
    few = replace(BASE, structured_outputs=form, ignore_eos=False, max_tokens=20)
    for options in ({}, {"presence_penalty": 0.5}, {"bad_words": ["a b"]}, {"logprobs": 1}):
        expected, held = (
            llm.generate("the quick", replace(few, min_tokens=least, **options))[0].outputs[0]
            for least in (0, 12)
        )
        assert (held.text, held.token_ids) == (expected.text, expected.token_ids)
        assert (held.finish_reason, held.stop_reason) == ("stop", None)
    longer = replace(few, structured_outputs={"regex": "[a-d]+"}, min_tokens=12)
    assert len(llm.generate("the quick", longer)[0].outputs[0].token_ids) >= 12


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"logit_bias": {320: 1.0}}, "prompt 1: logit_bias has token id 320, .* ends at 319"),
        ({"logit_bias": {320: 1.0, 5: 1.0, 999: 1.0}}, "logit_bias has token id 320, 999, which"),
        ({"allowed_token_ids": [1, 999]}, "prompt 1: allowed_token_ids has token id 999"),
        (
            {"structured_outputs": {"regex": "("}, "ignore_eos": False},
            r"prompt 1: structured_outputs\.regex cannot be used",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_starts(
    llm: LLM, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(RequestError, match=sentence):
        llm.generate(PROMPTS, [BASE, replace(BASE, **options), BASE])
    assert not llm.engine.has_work


def test_a_refused_request_leaves_a_running_one_alone(llm: LLM) -> None:
    expected = llm.generate("fox", BASE)[0].outputs[0].token_ids
    found = []
    for event in llm.stream("fox", BASE):
        found.append(event.token_id)
        with pytest.raises(RequestError, match="logit_bias"):
            llm.generate("fox", replace(BASE, logit_bias={320: 1.0}))
    assert found == expected


def test_a_processor_that_only_dislikes_wrong_drafts_is_no_error(
    tiny_llama: Path, tiny_drafter: Path
) -> None:
    """Plain decoding never shows it a refused draft, so that its failing there is nothing."""
    options = {"dtype": "float32", "memory": 2**24, "num_speculative_tokens": 5}
    plain, drafting = (LLM(tiny_llama, drafter=d, **options) for d in (None, tiny_drafter))
    expected = plain.generate(PROMPTS, BASE)
    known = [o.prompt_token_ids + o.outputs[0].token_ids for o in expected]
    refused = []

    def strict(ids: list[int], logits: Logits) -> Logits:
        if not any(whole[: len(ids)] == ids for whole in known):
            refused.append(ids)
            raise ValueError("this is not the text")
        return logits

    found = drafting.generate(PROMPTS, replace(BASE, logits_processors=[strict]))
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]
    assert refused


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"temprature": 1}, "no option 'temprature'; did you mean 'temperature'"),
        ({"best_of": 2}, "SamplingParams has no option 'best_of'; outrider generate --help lists"),
        ({"temperature": 1e300}, "at most 1000000"),
        ({"repetition_penalty": 0}, "give a number from 0.01 to 100"),
        ({"presence_penalty": 2.1}, "give a number from -2 to 2"),
        ({"frequency_penalty": math.nan}, "give a number from -2 to 2"),
        ({"logit_bias": {3: 101}}, "give ids with numbers from -100 to 100"),
        ({"logit_bias": {"x": 1}}, "give ids with numbers"),
        (
            {"logit_bias": {"x": 1, 3: 1, -4: 2, "5": 101, "y": None}},
            "logit_bias has 'x': 1, -4: 2, '5': 101, 'y': None; give ids",
        ),
        ({"logit_bias": {f"k{i}": 1 for i in range(20)}}, "'k0': 1, .*'k15': 1 and 4 more; give"),
        ({"logit_bias": [3]}, "give ids with numbers"),
        ({"bad_words": [""]}, "strings of 1 to 1000 characters"),
        ({"allowed_token_ids": []}, "give one id or more, or None"),
        ({"logprobs": 21}, "give 0 to 20"),
        ({"prompt_logprobs": -2}, "give 0 to 20"),
        ({"logits_processors": ["x"]}, "give functions of"),
        ({"structured_outputs": "json"}, "give StructuredOutputsParams or a dict"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "drop it"),
        ({"structured_outputs": {"regex": "a" * (2**18 + 1)}}, "give at most 262144"),
        ({"min_tokens": 9, "max_tokens": 8}, "give at most max_tokens"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        SamplingParams(**options)


def test_params_can_be_replaced() -> None:
    assert replace(SamplingParams(), temperature=0.5).temperature == 0.5
    whole = SamplingParams(
        stop="a", allowed_token_ids=[3], structured_outputs={"json": {"type": "object"}}
    )
    assert replace(whole, seed=None) == whole


def test_text_that_is_not_unicode_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="lone surrogates"):
        llm.generate("caf\udce9", BASE)


# Log probabilities.


def theirs(folder: Path, ids: list[int]) -> torch.Tensor:
    """transformers' log probabilities after each id: fp32 [ids, vocabulary]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return torch.as_tensor(model(torch.tensor([ids])).logits[0].log_softmax(-1))


def test_log_probabilities_are_the_models(llm: LLM, tiny_llama: Path) -> None:
    """Raw ones: before temperature, penalties and truncation, as vLLM's are."""
    params = replace(
        BASE, logprobs=3, prompt_logprobs=2, top_k=5, frequency_penalty=0.5, logit_bias={9: 50}
    )
    output = llm.generate(PROMPTS[2], params)[0]
    prompt, answer = output.prompt_token_ids, output.outputs[0]
    assert (
        answer.token_ids
        == llm.generate(PROMPTS[2], replace(params, logprobs=None))[0].outputs[0].token_ids
    ), "asking changes no draw"
    whole = theirs(tiny_llama, prompt + answer.token_ids)
    assert answer.logprobs is not None
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    listed = [*output.prompt_logprobs[1:], *answer.logprobs]
    assert len(listed) == len(prompt) + len(answer.token_ids) - 1
    for at, found in enumerate(listed):
        token = (prompt + answer.token_ids)[at + 1]
        count = 2 if at + 1 < len(prompt) else 3
        assert found is not None
        assert next(iter(found)) == token
        best = whole[at].topk(count).indices.tolist()
        assert set(found) == {token, *best}
        for id, entry in found.items():
            assert entry.logprob == pytest.approx(float(whole[at, id]), abs=2e-5)
            assert entry.rank == int((whole[at] > whole[at, id]).sum()) + 1
            assert entry.decoded_token is not None
    total = sum(f[t].logprob for f, t in zip(answer.logprobs, answer.token_ids, strict=True))
    assert answer.cumulative_logprob == pytest.approx(total)


def test_processed_log_probabilities_are_of_the_law(tiny_llama: Path, tmp_path: Path) -> None:
    llm = LLM(tiny_llama, drafter="ngram", dtype="float32", memory=2**24,
              logprobs_mode="processed_logprobs")  # fmt: skip
    params = replace(BASE, logprobs=5, top_k=5, temperature=0.5)
    answer = llm.generate("the the the", params)[0].outputs[0]
    assert answer.logprobs is not None
    for found in answer.logprobs:
        assert len(found) == 5
        assert sum(math.exp(entry.logprob) for entry in found.values()) == pytest.approx(1)


def test_zero_log_probabilities_are_those_of_the_tokens_alone(llm: LLM) -> None:
    answer = llm.generate("fox", replace(BASE, logprobs=0))[0].outputs[0]
    assert answer.logprobs is not None
    assert [list(found) for found in answer.logprobs] == [[t] for t in answer.token_ids]


# What ends an output.


def test_the_stop_string_may_be_kept(llm: LLM) -> None:
    long = replace(BASE, max_tokens=30)
    text = llm.generate("fox", long)[0].outputs[0].text
    stop = text[5:8]
    left = llm.generate("fox", replace(long, stop=stop))[0].outputs[0]
    kept = llm.generate("fox", replace(long, stop=stop, include_stop_str_in_output=True))[0]
    assert left.text == text[: text.index(stop)]
    assert kept.outputs[0].text == left.text + stop
    assert left.finish_reason == kept.outputs[0].finish_reason == "stop"


def test_bad_words_are_never_completed(llm: LLM) -> None:
    hot = replace(BASE, temperature=1.5, max_tokens=40)
    free = llm.generate(PROMPTS, hot)
    tokenizer = byte_level_tokenizer()
    said = {t: tokenizer.decode([t]) for o in free for t in o.outputs[0].token_ids}
    words = {t: w for t, w in said.items() if w.isalnum() and tokenizer.encode(w).ids == [t]}
    assert len(words) > 5
    banned = llm.generate(PROMPTS, replace(hot, bad_words=list(words.values())))
    assert not any(t in words for o in banned for t in o.outputs[0].token_ids)


def test_structured_output_is_what_it_should_be(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["fox", "dog"]}, "legs": {"type": "integer"}},
        "required": ["name", "legs"],
        "additionalProperties": False,
    }
    params = SamplingParams(
        temperature=1.0, max_tokens=100, seed=3, structured_outputs={"json": schema}, n=3,
        logit_bias={0: 5.0},
    )  # fmt: skip
    for sample in llm.generate("fox", params)[0].outputs:
        if sample.finish_reason == "stop":
            assert json.loads(sample.text)["name"] in ("fox", "dog")
        else:
            assert sample.text.lstrip().startswith("{")


def test_a_model_without_eos_has_no_structured_output(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "m", "llama", tokenizer=True, eos_token_id=None)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": None}))
    llm = LLM(folder, drafter=None, memory=2**24)
    with pytest.raises(RequestError, match="an end-of-sequence token"):
        llm.generate("fox", SamplingParams(structured_outputs={"regex": "a"}))


# What nobody foresaw.


class Unwritable(Detokenizer):
    """Text that raises at its third token."""

    count = 0

    def push(self, token: int, may_stop: bool = True) -> tuple[str, bool]:
        self.count += 1
        if self.count == 3:
            raise UnicodeError("no such text")
        return super().push(token, may_stop)


def no_pipeline(*_: Any) -> Any:
    raise ZeroDivisionError("no such pipeline")


@pytest.mark.parametrize("part", ["pipeline", "masks", "text", "frontend"])
def test_an_unforeseen_error_ends_its_own_request(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    alone = [llm.generate(prompt, BASE)[0].outputs[0] for prompt in PROMPTS]
    prepare = llm.engine.prepare

    def spoilt(request: Request) -> list[SequenceState]:
        (sequence,) = prepare(request)
        if request.seed == 666 and part == "pipeline":
            sequence.pipeline = SequencePipeline(llm.engine.pipeline_of(request))
            monkeypatch.setattr(sequence.pipeline, "apply", no_pipeline)
        elif request.seed == 666 and part == "masks":
            monkeypatch.setattr(sequence.pipeline, "masks", no_pipeline)
        elif request.seed == 666 and part == "text":
            sequence.text = Unwritable(byte_level_tokenizer(), [], ())
        return [sequence]

    def start(*args: Any, **options: Any) -> list[RequestState]:
        states = starts(*args, **options)
        for state in states:
            if state.request.seed == 666:
                state._texts = [Unwritable(byte_level_tokenizer(), [], ())]
        return states

    starts = llm.start
    if part == "frontend":
        monkeypatch.setattr(llm, "start", start)
    monkeypatch.setattr(llm.engine, "prepare", spoilt)
    form = {"structured_outputs": {"regex": "[a-z]{30}"}, "ignore_eos": False}
    bad = replace(BASE, seed=666, **(form if part == "masks" else {}))
    with pytest.raises(GenerationError, match=r"1 failed: an unexpected .*no such") as caught:
        llm.generate(PROMPTS, [BASE, bad, BASE])
    first, failed, last = (o.outputs[0] for o in caught.value.outputs)
    assert failed.finish_reason == "error"
    assert (first, last) == (alone[0], alone[2])
    check_engine(llm.engine)
    assert llm.engine.scheduler.pool.num_free == llm.engine.scheduler.pool.num_usable


def test_a_drafter_that_raises_costs_its_drafts_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if llm.drafter.name == "none":
        pytest.skip("plain decoding asks no drafter")
    expected = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, BASE)]
    propose, calls = llm.engine.drafter.propose, itertools.count()
    monkeypatch.setattr(llm.engine.menu, "switched_off", {})

    def failing(batch: Any, budgets: Any, noise: Any) -> Draft:
        made = propose(batch, budgets, noise)
        if next(calls) % 2:
            raise IndexError("no such token")
        return made

    monkeypatch.setattr(llm.engine.drafter, "propose", failing)
    assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, BASE)] == expected
    check_engine(llm.engine)
    assert "failed and is switched off" in caplog.text
    assert llm.engine.menu.switched_off == {llm.drafter.name: "IndexError: no such token"}
    assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, BASE)] == expected
    assert next(calls) == 2  # it is not asked again
    caplog.clear()


# What the doors refuse.


def test_max_tokens_above_the_context_is_refused_with_the_numbers(llm: LLM) -> None:
    sentence = r"max_tokens is 257, but the context of this model is 256 tokens; give at most that"
    with pytest.raises(RequestError, match=sentence):
        llm.generate("fox", replace(BASE, max_tokens=257))
    (clipped,) = llm.generate([5] * 250, replace(BASE, max_tokens=256))
    assert len(clipped.outputs[0].token_ids) == 6


def test_the_default_of_max_tokens_fits_any_context(tiny_llama: Path) -> None:
    llm = LLM(tiny_llama, drafter=None, max_model_len=8, memory=2**24)
    assert len(llm.generate([5, 6], SamplingParams(ignore_eos=True))[0].outputs[0].token_ids) == 6


def test_a_priority_needs_its_policy(llm: LLM, tiny_llama: Path) -> None:
    with pytest.raises(RequestError, match="priority is -1, but priority scheduling is not ena"):
        llm.inputs.request([5, 6], BASE, priority=-1)
    other = LLM(tiny_llama, drafter=None, memory=2**24, scheduling_policy="priority")
    request = other.inputs.request([5, 6], BASE, priority=-1).request
    other.engine.add(request)
    other.engine.abort(request.id)


@pytest.mark.parametrize("field", ["priority", "seed"])
@pytest.mark.parametrize("value", [2**64, -(2**63), True, 1.5, None])
def test_a_request_has_numbers_in_their_range(field: str, value: Any) -> None:
    given = {"seed": 1, field: value}
    with pytest.raises(ConfigError, match=f"Request: {field} is .*; give "):
        Request("a", (5, 6), BASE, **given)
