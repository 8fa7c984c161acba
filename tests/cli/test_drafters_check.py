"""``outrider drafters check``: what fits and what does not, with both values."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoConfig, PreTrainedTokenizerFast

from outrider import pocket
from outrider.drafters.check import DRAFT_TOKENS, losses
from outrider.text.intersection import Intersection
from tests.support.commands import outrider
from tests.support.heads import Eagle, make_head, save_head
from tests.support.retokenizing import other_tokenizer

run = partial(outrider, "drafters", "check")


def facts(*args: object) -> dict[str, dict[str, Any]]:
    done = run(*args, "--json")
    assert done.exit_code in (0, 1), done.output
    report = json.loads(done.stdout)
    assert (done.exit_code == 0) == report["fits"] == all(f["fits"] for f in report["facts"])
    return {fact["what"]: fact for fact in report["facts"]}


def changed(folder: Path, out: Path, **values: Any) -> Path:
    """A copy of a checkpoint with other values in its config."""
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, **values}))
    return out


def test_vocabularies_may_differ_by_padding_only(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Without tokenizers nothing says that a difference is padding."""
    sizes = {"bare": 128, "wide": 160, "tall": 128}
    for name, size in sizes.items():
        make_checkpoint(tmp_path / name, "llama", vocab_size=size)
    for name, fits in (("wide", False), ("tall", True)):
        found = facts(tmp_path / "bare", "--drafter", tmp_path / name)["vocabulary"]
        assert (found["drafter"], found["fits"]) == (str(sizes[name]), fits)
    assert found["target"] == "128"
    text = make_checkpoint(tmp_path / "text", "llama", tokenizer=True)
    own = json.loads((text / "config.json").read_text())["vocab_size"]
    padded = changed(text, tmp_path / "padded", vocab_size=own + 64)
    for pair in ((padded, text), (text, padded)):
        found = facts(pair[1], "--drafter", pair[0])["vocabulary"]
        assert found["fits"]
        assert "padding" in found["target"]
    found = facts(text, "--drafter", tmp_path / "bare")["vocabulary"]
    assert (found["fits"], found["target"]) == (False, f"{own}; another vocabulary")


@pytest.fixture(scope="module")
def head(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checked") / "head"
    return save_head(make_head(Eagle(), AutoConfig.from_pretrained(tiny_llama)), folder)


def test_each_mismatch_of_a_head_is_told_with_both_values(
    head: Path, tiny_llama: Path, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    own = AutoConfig.from_pretrained(tiny_llama)
    other = make_checkpoint(
        tmp_path / "other", "llama", hidden_size=2 * own.hidden_size,
        vocab_size=own.vocab_size + 8, num_hidden_layers=1,
    )  # fmt: skip
    found = facts(other, "--drafter", head)
    for what, mine, theirs in (
        ("vocabulary", own.vocab_size, own.vocab_size + 8),
        ("width", own.hidden_size, 2 * own.hidden_size),
        ("layers", "outputs of [0, 1, 1]", "1 layers"),
    ):
        assert (found[what]["drafter"], found[what]["target"]) == (str(mine), str(theirs))
        assert not found[what]["fits"]
    assert found["target"]["drafter"] == "some/target"
    assert found["tensors"]["fits"]
    assert all(fact["fits"] for fact in facts(tiny_llama, "--drafter", head).values())


def test_a_target_without_a_native_step_does_not_fit_a_head(
    head: Path, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    found = facts(make_checkpoint(tmp_path / "olmo", "olmo"), "--drafter", head)
    assert not found["family"]["fits"]
    assert found["family"]["target"] == "olmo"


def test_a_heads_own_tokenizer_is_compared(head: Path, tmp_path: Path) -> None:
    target, mine = tmp_path / "target", tmp_path / "head"
    shutil.copytree(pocket.PATH, target, ignore=shutil.ignore_patterns("drafter"))
    shutil.copytree(head, mine)
    PreTrainedTokenizerFast(tokenizer_object=other_tokenizer()).save_pretrained(mine)
    found = facts(target, "--drafter", mine)
    assert not found["tokenizer"]["fits"]
    assert "'<|endoftext|>' is missing, not 0" in found["tokenizer"]["drafter"]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pocket drafter with another tokenizer."""
    folder = tmp_path_factory.mktemp("other") / "other"
    return shutil.copytree(
        Path(pocket.PATH) / "drafter", folder, ignore=shutil.ignore_patterns("tokenizer*")
    )


def with_tokenizer(folder: Path, out: Path, tokenizer: Tokenizer) -> Path:
    shutil.copytree(folder, out)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(out)
    return out


def test_what_another_tokenizer_shares_and_loses_is_told(other: Path, tmp_path: Path) -> None:
    same = f"retokenize:{Path(pocket.PATH) / 'drafter'}"
    found = facts(pocket.PATH, "--drafter", same)
    assert found["tokens it can say"]["value"] == 1
    assert found["expected loss"]["value"] == 0
    mine = with_tokenizer(other, tmp_path / "mine", other_tokenizer())
    found = facts(pocket.PATH, "--drafter", f"retokenize:{mine}")
    count = int(found["shared vocabulary"]["drafter"].split()[0])
    assert found["shared vocabulary"]["target"].startswith(f"{count} tokens")
    assert 0 < found["tokens it can say"]["value"] < 1
    said, lost = found["tokens it can say"]["value"], found["expected loss"]["value"]
    assert 1 - said < lost < 1
    assert found["expected loss"]["fits"]
    text = " ".join(run(pocket.PATH, "--drafter", f"retokenize:{mine}").stdout.split())
    assert "expected loss" in text
    assert f"drafts of {DRAFT_TOKENS} tokens" in text
    # As a plain folder it does not fit, and the way out is named.
    found = facts(pocket.PATH, "--drafter", mine)
    assert "retokenize:PATH" in found["tokenizer"]["target"]


def test_another_tokenizer_that_does_not_serve_is_told(
    other: Path, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    found = facts(pocket.PATH, "--drafter", f"retokenize:{other}")
    assert (found["tokenizer"]["drafter"], found["tokenizer"]["target"]) == ("none", "there")
    words = with_tokenizer(other, tmp_path / "words", Tokenizer(models.WordLevel({"a": 0}, "a")))
    found = facts(pocket.PATH, "--drafter", f"retokenize:{words}")
    assert "neither byte-level nor SentencePiece" in found["tokenizer"]["drafter"]
    assert not found["tokenizer"]["fits"]
    found = facts(pocket.PATH, "--drafter", f"retokenize:{make_checkpoint(tmp_path / 'o', 'olmo')}")
    assert found["family"]["drafter"] == "olmo, no native step"
    assert not found["family"]["fits"]


def test_losses_are_those_of_drafts_that_end_at_what_is_not_shared() -> None:
    shared = Intersection([5, -1, 7], [-1] * 9, (0.2, 0.5))
    said, lost = losses(shared, [[5, 7, 1, 5, 5], [1]])
    assert said == 4 / 6
    # From each token on: 2, 1, 0, 2, 1 and 0 tokens, where 4, 4, 3, 2, 1 and 1 might follow.
    assert lost == pytest.approx(1 - 6 / 15)


@pytest.mark.parametrize("path", ["retokenize:", "retokenize:/nowhere/at/all", "/nowhere/at/all"])
def test_what_is_not_there_is_told_in_a_sentence(path: str) -> None:
    done = run(pocket.PATH, "--drafter", path)
    assert done.exit_code in (1, 2)
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
