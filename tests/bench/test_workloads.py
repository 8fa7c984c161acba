"""What a benchmark asks, and what it makes of a few rounds: workloads, intervals, the plot."""

from __future__ import annotations

import difflib
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from outrider import SamplingParams, pocket
from outrider.bench.intervals import median_interval, ranks
from outrider.bench.offline import Bench, BenchOptions
from outrider.bench.plot import draw
from outrider.bench.workload import BUNDLED, FOLDER, Item, Workload, load_workload
from outrider.checkpoints.tokenizers import read_codec
from outrider.errors import ConfigError
from outrider.params import StructuredOutputsParams
from outrider.sampling.grammar import Grammars
from outrider.text.codec import TextCodec


def written(tmp_path: Path, name: str, text: str) -> str:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    return str(file)


def test_lines_and_lists_say_the_same(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Who?"}]
    entries: list[Any] = [
        "def f(",
        {"prompt": "say é", "answer": "é\u2028x"},
        {"messages": messages, "schema": {"type": "string"}},
    ]
    lines = "\n\n".join(json.dumps(e, ensure_ascii=False) for e in entries)
    found = load_workload(written(tmp_path, "mine.jsonl", lines))
    assert found == load_workload(written(tmp_path, "mine.json", json.dumps(entries)))
    assert found == Workload(
        "mine",
        (
            Item("def f("),
            Item("say é", answer="é\u2028x"),
            Item(messages=tuple(messages), schema={"type": "string"}),
        ),
    )


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("x.jsonl", '"a"\n{"prompt": ', "x.jsonl, line 2: not JSON"),
        ("x.jsonl", '"a"\n\n7', "x.jsonl, line 3: neither a text nor an object"),
        ("x.jsonl", "\n", "is empty; give it one prompt"),
        ("x.json", '{"prompt": "a"}', "line 1: no list"),
        ("x.json", '["a",\n "b"', "not JSON (Expecting ',' delimiter: line 2"),
        ("x.json", '["a", {"promt": "b"}]', "item 2: give either prompt, messages or turns"),
        ("x.json", '[{"answer": "b"}]', "item 1: give either prompt, messages or turns"),
        ("x.json", '[{"prompt": "a", "messages": []}]', "give either prompt, messages or turns"),
        ("x.json", '[""]', "prompt is '';"),
        ("x.json", '[{"prompt": "a", "answer": 3}]', "answer is 3;"),
        ("x.json", '[{"prompt": "a", "schema": "object"}]', "schema is 'object';"),
        ("x.json", json.dumps([{"prompt": ["a"] * 3000}]), "..."),
        ("x.json", json.dumps([{"prompt": "a", "schema": "x" * 9999}]), "..."),
        ("x.json", '[{"messages": []}]', "messages must be a list"),
        ("x.json", '[{"messages": [{"role": "user"}]}]', "messages must be a list"),
        ("x.txt", "a", "is not known; give one of code, edit, prose, json, chat"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path: Path, name: str, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_workload(written(tmp_path, name, text))
    assert said in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_schema_that_cannot_be_used_is_refused_before_the_work(
    tiny_llama: Path, tmp_path: Path
) -> None:
    entries = ["a", {"prompt": "b", "schema": {"type": "nonsense"}}]
    workload = load_workload(written(tmp_path, "mine.json", json.dumps(entries)))
    options = BenchOptions(model=tiny_llama, target="tiny", drafters=("ngram",), max_tokens=4)
    with pytest.raises(ConfigError, match=r"prompt 2 of workload 'mine': structured_outputs\.json"):
        Bench(options, workload)


def test_files_that_cannot_be_read_and_counts_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_workload(str(tmp_path / "none.jsonl"))
    (tmp_path / "latin.json").write_bytes('["é"]'.encode("latin-1"))
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_workload(str(tmp_path / "latin.json"))
    many = Workload.of_prompts("many", [str(i) for i in range(10)])
    assert [len(many.first(n).items) for n in (None, 1, 10)] == [8, 1, 10]
    for count in (0, 11):
        with pytest.raises(ConfigError, match="give 1 to 10"):
            many.first(count)


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return read_codec(pocket.PATH)


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_workloads_have_answers_and_fit_small_contexts(name: str, codec: TextCodec) -> None:
    items = load_workload(name).items
    assert len(items) == 8
    for item in items:
        assert item.answer is not None
        answer = codec.backend.encode(item.answer).ids
        assert len(answer) > 100
        assert len(item.encode(codec)) + len(answer) < 1024
    assert len({tuple(item.encode(codec)) for item in items}) == 8


def test_bundled_workloads_are_small() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 200_000


def test_an_edit_returns_the_file_with_one_change() -> None:
    for item in load_workload("edit").items:
        asked, before, after, rest = item.prompt.split("```\n")
        assert asked.startswith("Return the whole file with one change. ")
        assert (after, rest) == ("\nThe changed file:\n\n", "")
        assert item.answer is not None
        assert item.answer.endswith("```\n")
        old, new = before.splitlines(), item.answer.removesuffix("```\n").splitlines()
        changes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
        assert len([c for c in changes if c[0] != "equal"]) == 1


def test_json_answers_keep_to_their_schemas(codec: TextCodec) -> None:
    grammars = Grammars(lambda: codec.backend, 4096, frozenset([0]))
    for item in load_workload("json").items:
        form = StructuredOutputsParams(json=item.schema)
        grammar = grammars.compile(SamplingParams(structured_outputs=form))
        assert grammar is not None
        assert item.answer is not None
        ended = [*codec.backend.encode(item.answer).ids, 0]
        assert grammar.accepts(ended) == len(ended)


def test_chats_have_several_turns() -> None:
    for item in load_workload("chat").items:
        roles = [m["role"] for m in item.messages]
        assert roles == (["user", "assistant"] * 3)[: len(roles)]
        assert len(roles) in (3, 5)


def test_intervals_of_a_median_cover_what_they_say() -> None:
    assert [median_interval(range(n)) for n in (0, 1, 5)] == [None, None, None]
    # Tables of the sign test: Le Boudec (2010), appendix A.
    known = {6: (1, 6), 7: (1, 7), 8: (1, 8), 9: (2, 8), 10: (2, 9), 15: (4, 12), 25: (8, 18)}
    for n, (low, high) in known.items():
        values = [float(v) for v in range(n, 0, -1)]
        assert median_interval(values) == (low, high)
        assert ranks(n)[0] == low
    # Whether each of 9 values lies above their median: all 512 cases are equally likely.
    for n in (6, 7, 9):
        j, confidence = ranks(n)
        holds = sum(j <= sum(case) <= n - j for case in product((0, 1), repeat=n))
        assert confidence == pytest.approx(holds / 2**n)
        assert confidence >= 0.95


def report(replay: dict[str, str] | None = None) -> dict[str, Any]:
    runs = [
        {
            "target": "a", "workload": "code", "replay": replay, "structured_outputs": False,
            "turns": None, "drafter": drafter,
            "num_speculative_tokens": k, "temperature": t, "batch_size": b, "speedup": 1.5,
            "speedup_interval": [1.2, 1.9] if k < 4 else None,
            "acceptance_by_position": [0.5] * k if drafter != "none" else None,
        }
        for t in (0.0, 1.0) for b in (1, 2, 4)
        for drafter, k in (("none", 0), ("ngram", 2), ("ngram", 4), ("/a/long" * 9, 2))
    ]  # fmt: skip
    machine = {
        "dtype": "float32",
        "quantization": None,
        "drafter_quantization": "auto",
        "drafter_window": 7,
        "preset": None,
        "cpu": "a processor",
        "cores": 2,
    }
    return {"machine": machine, "rounds": 7, "intervals": {"confidence": 0.984}, "runs": runs}


def test_the_plot_is_a_png_that_says_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []
    from matplotlib.figure import Figure

    suptitle = Figure.suptitle
    monkeypatch.setattr(
        Figure, "suptitle", lambda self, t, **kw: (texts.append(t), suptitle(self, t, **kw))[1]
    )
    draw(report(), tmp_path / "a.png")
    draw(report({"what": "recorded answers"}), tmp_path / "b.png")
    for name in ("a.png", "b.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert "replay" not in texts[0]
    assert "drafter's window 7" in texts[0]
    assert "replay: recorded answers" in texts[1]
    with pytest.raises(ConfigError, match="cannot be written"):
        draw(report(), tmp_path / "none" / "c.png")
