"""A tokenizer may know ids that its model lacks: they are refused or left out, everywhere."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider import LLM, SamplingParams
from outrider.base.types import Speculation
from outrider.errors import ConfigError, RequestError
from outrider.sampling.pipeline import Logits
from tests.support.tiny import PAD, VOCABULARY, build_checkpoint, padded_copy

BASE = SamplingParams(temperature=0.8, max_tokens=8, seed=5, ignore_eos=True)
OPTIONS: dict[str, Any] = {"dtype": "float32", "memory": 2**24, "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def llm(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = padded_copy(tiny_llama, tmp_path_factory.mktemp("padded") / "model")
    return LLM(folder, drafter="ngram", **OPTIONS)


@pytest.mark.parametrize(
    "options",
    [
        {"bad_words": [PAD]},
        {"bad_words": [f"the {PAD}", PAD]},
        {"stop_token_ids": [VOCABULARY, 2**31 - 1]},
        {"stop": PAD},
    ],
)
def test_what_the_model_cannot_say_changes_nothing(llm: LLM, options: dict[str, Any]) -> None:
    plain = llm.generate("the quick", BASE)[0].outputs[0]
    found = llm.generate("the quick", replace(BASE, **options))[0].outputs[0]
    assert found.token_ids == plain.token_ids


@pytest.mark.parametrize(
    ("prompt", "options", "sentence"),
    [
        (f"fox {PAD}", {}, "the prompt has token id 320, which is out of vocabulary"),
        ([5, 2**64], {}, f"the prompt has token id {2**64}, which"),
        ([5, -1], {}, "the prompt has token id -1, which"),
        ([5, 10**5000], {}, "the prompt has token id a value too long to be shown, which"),
        ([5, True], {}, "a prompt is a text or a list of token ids"),
        ("fox", {"logit_bias": {VOCABULARY: 1}}, "logit_bias has token id 320, which"),
        ("fox", {"allowed_token_ids": [2, VOCABULARY]}, "allowed_token_ids has token id 320"),
    ],
)
def test_what_asks_for_an_unknown_id_is_refused(
    llm: LLM, prompt: Any, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(RequestError, match=sentence):
        llm.generate(prompt, replace(BASE, **options))
    assert not llm.engine.has_work


@pytest.mark.parametrize("id", [VOCABULARY, 2**31 - 1])
def test_a_prediction_of_unknown_ids_is_refused(llm: LLM, id: int) -> None:
    with pytest.raises(RequestError, match=f"prediction has token id {id}, which is out"):
        llm.generate([5, 6], BASE, speculation=Speculation(prediction=(5, id)))


@pytest.mark.parametrize("ids", [(2**31,), (-1,), (True,), (1.5,), "text", None])
def test_a_prediction_of_no_ids_is_refused(ids: Any) -> None:
    with pytest.raises(ConfigError, match=r"Speculation: prediction is .*; give token ids"):
        Speculation(prediction=ids)


def test_an_eos_of_minus_one_ends_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": -1}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    llm = LLM(folder, drafter=None, **OPTIONS)
    params = replace(BASE, ignore_eos=False, min_tokens=4)
    assert len(llm.generate("fox", params)[0].outputs[0].token_ids) == 8


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_a_drafter_stops_behind_an_id_that_it_lacks(
    tiny_llama: Path, tmp_path: Path, rule: str
) -> None:
    """A processor may want an id that the drafter's smaller vocabulary does not have."""
    drafter = build_checkpoint(tmp_path / "drafter", "llama", vocab_size=VOCABULARY - 20)

    def late(ids: list[int], logits: Logits) -> Logits:
        made = np.full_like(logits, -np.inf)
        made[VOCABULARY - 1 if len(ids) == 5 else 7] = 0.0
        return made

    params = replace(BASE, logits_processors=[late])
    llm = LLM(tiny_llama, drafter=drafter, acceptance_rule=rule, **OPTIONS)
    plain = LLM(tiny_llama, drafter=None, acceptance_rule=rule, **OPTIONS)
    found, expected = (one.generate([5, 6, 7], params)[0].outputs[0] for one in (llm, plain))
    assert found.token_ids == expected.token_ids
    assert VOCABULARY - 1 in found.token_ids
