"""Files of MT-Bench, Spec-Bench and SPEED-Bench: what is read, asked and told by category."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider import LLM, SamplingParams
from outrider.bench.load.datasets import body_of, load_prompts
from outrider.bench.offline import Bench, BenchOptions
from outrider.bench.workload import PLACEHOLDER, Item, load_workload
from outrider.checkpoints.tokenizers import read_codec
from outrider.cli import app
from outrider.errors import ConfigError
from tests.support.tiny import build_checkpoint, save_tokenizer

MT_BENCH = [
    {"question_id": 81, "category": "writing", "turns": ["Write of a fox.", "Now without an e."]},
    {"question_id": 101, "category": "math", "turns": ["What is 2 + 2?", "And 3?"],
     "reference": ["4", "7"]},
]  # fmt: skip
SPEC_BENCH = [
    {"question_id": 265, "category": "summarization", "turns": ["Summarize: a fox jumps."],
     "reference": ["A fox."]},
    {"question_id": 1, "category": "translation", "turns": ["Translate: ein Fuchs"]},
]  # fmt: skip
SPEED_BENCH = [
    {"question_id": "0a1b", "category": "coding", "sub_category": "python", "turns": ["def fox("],
     "source": "a/b", "src_id": "x_7", "difficulty": "", "multiturn": False},
    {"question_id": "2c3d", "category": "rag", "sub_category": None, "turns": ["Who?", "Why?"],
     "source": "a/c", "src_id": "x_8", "difficulty": "", "multiturn": True},
]  # fmt: skip
NAME = "a[/red]\n\x1b[31m"
"""A category that would be markup of a table, and a control sequence."""
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def lines(file: Path, entries: Sequence[Any]) -> str:
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return str(file)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("entries", [MT_BENCH, SPEC_BENCH, SPEED_BENCH])
def test_files_are_read_as_they_are(tmp_path: Path, entries: list[dict[str, Any]]) -> None:
    workload = load_workload(lines(tmp_path / "question.jsonl", entries))
    assert workload.name == "question"
    for item, entry in zip(workload.items, entries, strict=True):
        messages = tuple(map(user, entry["turns"]))
        first = entry["turns"][0]
        assert item == Item(first, messages, turns=True, category=entry["category"])
        assert item.opening == [user(first)]
        assert body_of(item, True, {})["messages"] == [user(first)]
        assert body_of(item, False, {}) == {"prompt": first}
    assert load_prompts(str(tmp_path / "question.jsonl")) == workload
    (tmp_path / "question.json").write_text(json.dumps(entries), encoding="utf-8")
    assert load_workload(str(tmp_path / "question.json")) == workload


def test_rows_of_parquet_are_such_objects(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = tmp_path / "test.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(SPEED_BENCH), file)
    same = load_workload(lines(tmp_path / "test.jsonl", SPEED_BENCH))
    assert load_workload(str(file)) == same
    bad = [SPEED_BENCH[0], {**SPEED_BENCH[1], "turns": [f"{PLACEHOLDER} USING SPECDEC_BENCH"]}]
    parquet.write_table(pyarrow.Table.from_pylist(bad), file)
    with pytest.raises(ConfigError, match=r"parquet, row 2: the text is still to be fetched"):
        load_workload(str(file))
    whole = file.read_bytes()
    for damaged in (b"", b"PAR1", whole[:-9], whole[:40] + bytes(40) + whole[80:]):
        file.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"not a \.parquet file") as caught:
            load_workload(str(file))
        assert len(str(caught.value)) < 500
        assert "\n" not in str(caught.value)


def test_parquet_without_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"needs pyarrow; run pip install pyarrow, or give"):
        load_workload(str(tmp_path / "test.parquet"))


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"turns": []}, "turns is [];"),
        ({"turns": "Who?"}, "turns is 'Who?';"),
        ({"turns": ["Who?", 7]}, "turns is ['Who?', 7];"),
        ({"turns": ["Who?", ""]}, "turns is ['Who?', ''];"),
        ({"turns": [["Who?"]]}, "turns is [['Who?']];"),
        ({"turns": None}, "turns is None;"),
        ({"turns": {"0": "Who?"}}, "turns is {'0': 'Who?'};"),
        ({"turns": ["x" * 9_000_000, 7]}, "turns is ['xxx"),
        ({"turns": ["Who?"], "category": 7}, "category is 7;"),
        ({"turns": ["Who?"], "category": ""}, "category is '';"),
        ({"turns": ["Who?"], "category": "x" * 101}, "category is 'xxx"),
        ({"turns": ["Who?"], "category": ["qa"]}, "category is ['qa'];"),
        ({"turns": ["Who?"], "prompt": "Who?"}, "give either prompt, messages or turns"),
        ({"question_id": 7, "category": "qa"}, "give either prompt, messages or turns"),
        ({"turns": [f"{PLACEHOLDER} USING"]}, "the text is still to be fetched"),
        (7, "neither a text nor an object"),
    ],
)
def test_a_bad_entry_is_named_with_its_line(tmp_path: Path, entry: Any, said: str) -> None:
    file = lines(tmp_path / "question.jsonl", [*MT_BENCH, entry])
    with pytest.raises(ConfigError) as caught:
        load_workload(file)
    assert f"question.jsonl, line 3: {said}" in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_file_that_is_not_utf_8_or_empty(tmp_path: Path) -> None:
    file = tmp_path / "question.jsonl"
    file.write_bytes(json.dumps(MT_BENCH[0]).encode() + b'\n{"turns": ["\xe9"]}\n')
    with pytest.raises(ConfigError, match=r"line 2: not UTF-8"):
        load_workload(str(file))
    file.write_bytes(b"")
    with pytest.raises(ConfigError, match="is empty"):
        load_workload(str(file))


def test_a_category_of_other_data_sets_may_be_anything(tmp_path: Path) -> None:
    entries = [{"prompt": "a", "category": 7}, {"prompt": "b", "category": "qa"}]
    found = load_workload(lines(tmp_path / "mine.jsonl", entries))
    assert [item.category for item in found.items] == [None, "qa"]


def test_a_few_prompts_are_of_all_categories(tmp_path: Path) -> None:
    names = ["writing"] * 3 + ["math"] * 2 + ["qa"]
    entries = [{"category": name, "turns": [f"{i}"]} for i, name in enumerate(names)]
    workload = load_workload(lines(tmp_path / "question.jsonl", entries))
    chosen = [[item.prompt for item in workload.first(n).items] for n in (3, 5, 6)]
    assert chosen == [["0", "3", "5"], ["0", "3", "5", "1", "4"], ["0", "3", "5", "1", "4", "2"]]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that chats."""
    folder = build_checkpoint(tmp_path_factory.mktemp("chats"), "llama", tokenizer=True)
    save_tokenizer(folder, TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model without a chat template."""
    folder = build_checkpoint(tmp_path_factory.mktemp("base"), "llama", tokenizer=True)
    (folder / "chat_template.jinja").unlink()
    return folder


def opened(model: Path, file: str, **options: Any) -> Bench:
    engine = {"dtype": "float32"}
    asked = BenchOptions(
        model=model, target="t", drafters=("ngram",), max_tokens=5, engine=engine, **options
    )
    return Bench(asked, load_workload(file))


def test_turns_stand_behind_the_models_own_answers(chats: Path, tmp_path: Path) -> None:
    bench = opened(chats, lines(tmp_path / "question.jsonl", [*MT_BENCH, *SPEC_BENCH]))
    items = bench.workload.items
    categories = ["writing", "writing", "math", "math", "summarization", "translation"]
    assert [item.category for item in items] == categories
    llm = LLM(chats, None, dtype="float32")
    codec = read_codec(chats)
    greedy = SamplingParams(temperature=0, max_tokens=5)
    for first, second, entry in zip(items[0:4:2], items[1:4:2], MT_BENCH, strict=True):
        asked, then = str(entry["turns"][0]), str(entry["turns"][1])
        assert first.opening == [user(asked)]
        said = llm.generate([codec.chat([user(asked)])], greedy)[0].outputs[0].text
        answer = {"role": "assistant", "content": said}
        assert list(second.messages) == [user(asked), answer, user(then)]
        assert bench.prompts[items.index(second)] == codec.chat(list(second.messages))
    assert len(bench.prompts) == len(bench.limits) == 6


def test_a_model_without_a_template_is_asked_first_turns(base: Path, tmp_path: Path) -> None:
    bench = opened(base, lines(tmp_path / "question.jsonl", MT_BENCH))
    codec = read_codec(base)
    assert bench.prompts == [codec.encode(entry["turns"][0]) for entry in MT_BENCH]


def test_batches_count_turns(chats: Path, tmp_path: Path) -> None:
    file = lines(tmp_path / "question.jsonl", [*MT_BENCH, SPEC_BENCH[0]])
    with pytest.raises(ConfigError, match="batch_size 3 does not divide the 5 prompts"):
        opened(chats, file, batch_sizes=(3,))


def run(model: Path, file: str, *words: str) -> tuple[str, dict[str, Any]]:
    out = Path(file).with_suffix(".out")
    asked = ["bench", "--model", str(model), "--prompts", file, "--drafter", "ngram"]
    small = ["--max-tokens", "6", "--dtype", "float32", "--temperature", "0", "--out", str(out)]
    done = CliRunner().invoke(app, [*asked, *small, *words], terminal_width=300)
    assert done.exit_code == 0, done.output
    return done.output, json.loads(out.read_text(encoding="utf-8"))


def test_results_are_told_by_category(chats: Path, base: Path, tmp_path: Path) -> None:
    control = {"category": NAME, "turns": ["the quick brown fox"]}
    file = lines(tmp_path / "question.jsonl", [*MT_BENCH, control])
    said, report = run(chats, file, "--batch-size", "5")
    plain, drafted = report["runs"]
    assert list(plain["categories"]) == [NAME, "math", "writing"]
    for each in (*plain["categories"].values(), *drafted["categories"].values()):
        assert each["outputs_identical"]
        assert each["tokens_per_second"] > 0
    assert [each["num_samples"] for each in drafted["categories"].values()] == [1, 2, 2]
    assert {each["speedup"] for each in plain["categories"].values()} == {1.0}
    assert {each["acceptance_length"] for each in plain["categories"].values()} == {None}
    assert drafted["turns"] == "all"
    assert "by category" in said
    assert "turn by turn behind" in " ".join(said.split())
    assert "a[/red] \u241b[31m" in said
    assert "\x1b[31m" not in said
    said, report = run(base, lines(tmp_path / "first.jsonl", MT_BENCH))
    assert report["runs"][0]["turns"] == "first"
    assert "first turns of conversations alone" in " ".join(said.split())


def test_counts_of_categories_add_up(chats: Path, tmp_path: Path) -> None:
    texts = ["the the the the", "fox fox fox fox"]
    entries = [{"category": str(i), "turns": [text]} for i, text in enumerate(texts)]
    _, report = run(chats, lines(tmp_path / "question.jsonl", entries), "--max-tokens", "40")
    drafted = report["runs"][1]
    each = [found["acceptance_rate"] for found in drafted["categories"].values()]
    known = [rate for rate in each if rate is not None]
    assert known
    assert min(known) <= drafted["acceptance_rate"] <= max(known)


def test_without_categories_there_is_no_second_table(base: Path, tmp_path: Path) -> None:
    said, report = run(base, lines(tmp_path / "mine.jsonl", ["the quick", "brown fox"]))
    assert report["runs"][0]["categories"] == {}
    assert report["runs"][0]["turns"] is None
    assert "by category" not in said
