"""Data from the target itself: prompts, answers, shards, and what is wrong with them."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from outrider import LLM
from outrider.bench.workload import Item
from outrider.checkpoints.files import read_header, save_file
from outrider.errors import ConfigError, ModelError
from outrider.training import answers
from outrider.training.answers import write_answers
from outrider.training.data import DataOptions, make_data
from outrider.training.prompts import read_prompts
from outrider.training.samples import MANIFEST, About, DataFolder, Sample, batches
from tests.support.disks import no_file_above

USER = [{"role": "user", "content": "one"}]


def about(**changed: Any) -> About:
    values = {
        "target": "t", "vocab_size": 320, "prompts": "p", "num_prompts": 9,
        "temperatures": (0.0, 0.8), "max_tokens": 12, "context": 64, "seed": 3,
    }  # fmt: skip
    return About(**{**values, **changed})


def sample(number: int, length: int = 6) -> Sample:
    return Sample(np.arange(length, dtype=np.int32), np.arange(length) > 2, number)


def jsonl(file: Path, *lines: Any) -> Path:
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.write_text("\n".join(text) + "\n")
    return file


def test_what_is_written_is_read(tmp_path: Path) -> None:
    data = DataFolder(tmp_path / "new", about(), ())
    data.add([sample(n, 4 + n) for n in range(5)], 0, 5)
    data.add([], 5, 7)
    data.add([sample(n) for n in range(7, 60)], 7, 60)
    again = DataFolder.opened(tmp_path / "new")
    assert again.about == about()
    assert again.shards == data.shards
    assert again.done == 60
    read = again.read()
    everything = sorted([*read.train, *read.held_out], key=lambda s: s.prompt)
    assert [s.prompt for s in everything] == [*range(5), *range(7, 60)]
    assert [len(s.tokens) for s in everything[:5]] == [4, 5, 6, 7, 8]
    assert (everything[2].said == (np.arange(6) > 2)).all()
    assert {s.prompt for s in read.held_out} == {
        n for n in [*range(5), *range(7, 60)] if sample(n).is_held_out
    }
    assert read.held_out
    assert read.counts(320)[3] == len(read.train)
    assert read.counts(320)[2] == 0


def test_an_epoch_has_every_sample_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    data = DataFolder(tmp_path, about(), ())
    data.add([sample(n) for n in range(50)], 0, 50)
    read = data.read()
    orders = [[s.prompt for s in read.epoch(0, number)] for number in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == [s.prompt for s in read.train]
    made = [*batches(read.epoch(0, 0), 7)]
    assert [s.prompt for batch in made for s in batch] == orders[0]
    assert all(sum(int(s.said.sum()) for s in batch) >= 7 for batch in made[:-1])


def test_damage_is_told(tmp_path: Path) -> None:
    data = DataFolder(tmp_path, about(), ())
    with pytest.raises(ConfigError, match=r"has no data\.json"):
        DataFolder.opened(tmp_path)
    data.add([], 0, 5)
    with pytest.raises(ConfigError, match="holds no samples"):
        DataFolder.opened(tmp_path).read()
    data.add([sample(1)], 5, 9)
    shard = tmp_path / data.shards[1].file
    good = shard.read_bytes()
    shard.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(ConfigError, match="was changed"):
        DataFolder.opened(tmp_path).read()
    shard.unlink()
    with pytest.raises(ConfigError, match="missing"):
        DataFolder.opened(tmp_path).read()
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    for path, value in (
        (("version",), 2), (("about", "vocab_size"), 0), (("about", "seed"), "x"),
        (("about", "temperatures"), []), (("about", "temperatures"), [0]),
        (("about", "temperatures"), [-1.0]), (("about", "context"), 2**31),
        (("shards",), [1]), (("shards", 0, "file"), "../x"), (("shards", 0, "tokens"), -1),
    ):  # fmt: skip
        changed = json.loads(json.dumps(manifest))
        inner = changed
        for name in path[:-1]:
            inner = inner[name]
        inner[path[-1]] = value
        (tmp_path / MANIFEST).write_text(json.dumps(changed))
        with pytest.raises(ConfigError, match=str(path[-1])):
            DataFolder.opened(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("offsets", [0, 6, 3, 18]), ("offsets", [0, 6, 12, 99]), ("offsets", [1, 6, 12, 18]),
     ("offsets", []), ("offsets", [0, 18]), ("prompts", [0, 1, -2]), ("prompts", [0, 1]),
     ("tokens", [320] * 18), ("tokens", [-1] * 18), ("tokens", [0] * 17), ("said", [False] * 17),
     ("said", [True] * 18), ("said", [[False]] * 18), ("said", [0.0] * 18), ("said", None)],
)  # fmt: skip
def test_a_shard_of_another_form_is_told(
    name: str, value: list[Any] | None, tmp_path: Path
) -> None:
    """The manifest has its checksum, so that it was not damaged by accident."""
    data = DataFolder(tmp_path, about(), ())
    data.add([sample(n) for n in range(3)], 0, 3)
    file = tmp_path / data.shards[0].file
    columns = {n: entry.read() for n, entry in read_header(file).items()}
    if value is None:
        del columns[name]
    else:
        floats = bool(value) and isinstance(value[0], float)
        columns[name] = np.array(value, np.float64 if floats else columns[name].dtype)
    save_file(columns, file, {})
    digest = sha256(file.read_bytes()).hexdigest()
    with pytest.raises(ModelError, match=r"damaged \(.*write the data again"):
        DataFolder(tmp_path, about(), [data.shards[0]._replace(sha256=digest)]).read()


def test_a_folder_of_something_else_stays_as_it_is(tiny_llama: Path, tmp_path: Path) -> None:
    file = jsonl(tmp_path / "p.jsonl", {"prompt": "one"})
    other = tmp_path / "target"
    other.mkdir()
    (other / "config.json").write_text("{}")
    for out, why in ((other, "config.json of something else"), (file, "no folder")):
        with pytest.raises(ConfigError, match=why):
            make_data(str(tiny_llama), out, DataOptions(prompts=file), lambda *_: None, print)
    assert [*other.iterdir()] == [other / "config.json"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("samples", 2**31),
        ("samples", 0),
        ("max_tokens", 2**63),
        ("temperatures", (float("nan"),)),
        ("minutes", 0),
        ("minutes", float("inf")),
    ],
)
def test_options_out_of_range_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name.rstrip("s")):
        DataOptions(**{name: value})


def test_prompts_come_in_many_forms(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    file = jsonl(
        tmp_path / "p.jsonl", '"a text"', {"prompt": "p", "more": 1},
        {"text": "t"}, {"messages": USER, "answer": 7}, {"conversations": turns}, "",
    )  # fmt: skip
    items = read_prompts(file, False, print)
    assert [i.prompt for i in items] == ["a text", "p", "t", "", ""]
    assert items[3].messages == tuple(USER)
    assert [m["role"] for m in items[4].messages] == ["user", "assistant"]


def test_a_folder_of_lines_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", ".hidden.jsonl", "c.json"):
        jsonl(tmp_path / name, {"prompt": name})
    assert [i.prompt for i in read_prompts(tmp_path, False, print)] == ["a.jsonl", "b.jsonl"]
    jsonl(tmp_path / "b.jsonl", {"prompt": "fine"}, "{")
    with pytest.raises(ConfigError, match=r"b\.jsonl, line 2"):
        read_prompts(tmp_path, False, print)


@pytest.mark.parametrize(
    ("line", "why"),
    [("{", "not JSON"), ("[1]", "neither a text nor an object"),
     ('{"x": 1}', "prompt, messages or turns"),
     ('{"prompt": ""}', "not empty"), ('{"messages": []}', "messages must be"),
     ('{"messages": [{"role": 1, "content": "x"}]}', "messages must be"),
     ('"\\ud800"', "lone surrogates"), ("[" * 100_000, "not JSON")],
)  # fmt: skip
def test_a_bad_line_is_told_by_its_number_or_left_out(line: str, why: str, tmp_path: Path) -> None:
    file = jsonl(tmp_path / "p.jsonl", {"prompt": "good"}, line, {"prompt": "fine"})
    with pytest.raises(ConfigError, match=f"line 2.*{why}"):
        read_prompts(file, False, print)
    said: list[str] = []
    assert [i.prompt for i in read_prompts(file, True, said.append)] == ["good", "fine"]
    assert len(said) == 1
    assert "line 2" in said[0]


def test_surrogates_in_a_list_are_told(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    file.write_text('["good", "\\ud800"]')
    with pytest.raises(ConfigError, match="item 2: lone surrogates"):
        read_prompts(file, False, print)


def test_a_file_without_prompts_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no prompt"):
        read_prompts(jsonl(tmp_path / "p.jsonl", ""), True, print)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path / "none.jsonl", True, print)


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> LLM:
    return LLM(tiny_llama, max_num_seqs=8, max_model_len=64, enable_prefix_caching=False)


def written(llm: LLM, folder: Path, items: list[Item], stop: int | None = None) -> list[Sample]:
    data = DataFolder(folder, about(), ())
    if (folder / MANIFEST).exists():
        data = DataFolder.opened(folder)
    write_answers(llm, items if stop is None else items[:stop], data, False, lambda done: None)
    if not data.shards:
        return []
    read = data.read()
    return sorted([*read.train, *read.held_out], key=lambda s: s.prompt)


ITEMS = [Item(f"the quick brown fox {n}") for n in range(9)]


def test_answers_are_the_targets_and_go_on_where_they_ended(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = written(llm, tmp_path / "whole", ITEMS)
    assert [s.prompt for s in whole] == [*range(9)]
    first = whole[0]
    prompt = llm.inputs.codec.encode(ITEMS[0].prompt)
    assert first.tokens[: len(prompt)].tolist() == prompt
    assert not first.said[: len(prompt)].any()
    assert first.said[len(prompt) :].all()
    assert 1 <= len(first.tokens) - len(prompt) <= 12
    monkeypatch.setattr(answers, "BLOCK", 2)
    written(llm, tmp_path / "parts", ITEMS, stop=4)
    parts = written(llm, tmp_path / "parts", ITEMS)
    for a, b in zip(whole, parts, strict=True):
        assert (a.tokens == b.tokens).all()
        assert (a.said == b.said).all()


def test_a_full_disk_ends_it_and_the_same_command_goes_on(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "BLOCK", 3)
    whole = written(llm, tmp_path / "whole", ITEMS)
    largest = max(file.stat().st_size for file in (tmp_path / "whole").iterdir())
    for most in (0, largest // 2, largest - 1):
        folder = tmp_path / str(most)
        with no_file_above(most), pytest.raises((OSError, ModelError), match="File too large"):
            written(llm, folder, ITEMS)
        assert not [*folder.glob(".*")]
        parts = written(llm, folder, ITEMS)
        for a, b in zip(whole, parts, strict=True):
            assert (a.tokens == b.tokens).all()


class Echo:
    """A target that answers a prompt of n ids with [n, 9], and its tokenizer: one id a letter.

    Its template writes earlier turns as they were said, or ``anew``.
    """

    def __init__(self, anew: bool) -> None:
        self.inputs, self.codec, self._anew = self, self, anew

    def chat(self, history: list[dict[str, Any]]) -> list[int]:
        ids: list[int] = []
        for message in history:
            said = message["role"] == "assistant"
            more = [int(x) for x in message["content"].split()]
            ids += more[:1] if said and self._anew else more if said else [100, *more, 101]
        return ids

    def generate(self, prompts: list[list[int]], params: Any) -> list[Any]:
        answers = ([len(ids), 9] for ids in prompts)
        return [
            SimpleNamespace(
                outputs=[
                    SimpleNamespace(
                        token_ids=each, text=" ".join(map(str, each)), finish_reason="stop"
                    )
                ]
            )
            for each in answers
        ]


@pytest.mark.parametrize("anew", [False, True])
def test_every_turn_is_answered_by_the_target(anew: bool, tmp_path: Path) -> None:
    """What others answered is left out; earlier answers of the target's stand in later prompts."""
    texts = [
        ("system", "1"),
        ("user", "2"),
        ("assistant", "0 0"),
        ("user", "3"),
        ("assistant", "0"),
    ]
    item = Item(messages=tuple({"role": role, "content": text} for role, text in texts))
    data = DataFolder(tmp_path, about(), ())
    write_answers(Echo(anew), [item], data, False, lambda done: None)
    read = data.read()
    first = [100, 1, 101, 100, 2, 101]
    if anew:  # the second prompt does not begin with what was said
        expected = [([*first, 6, 9], 2), ([*first, 6, 100, 3, 101, 10, 9], 2)]
    else:
        expected = [([*first, 6, 9, 100, 3, 101, 11, 9], 4)]
    found = [*read.train, *read.held_out]
    assert [(s.tokens.tolist(), int(s.said.sum())) for s in found] == expected
    assert all(s.prompt == 0 for s in found)
    assert found[0].said.tolist()[:8] == [False] * 6 + [True] * 2


@pytest.mark.parametrize("context", [62, 100_000])
def test_a_conversation_ends_where_the_context_does_or_after_many_turns(
    context: int, tmp_path: Path
) -> None:
    item = Item(
        messages=tuple({"role": "user", "content": str(n)} for n in range(answers.TURNS + 9))
    )
    data = DataFolder(tmp_path, about(context=context), ())
    assert write_answers(Echo(False), [item], data, False, lambda done: None) == 0
    read = data.read()
    (sample,) = [*read.train, *read.held_out]
    fit = 1 + (context - 4) // 5  # a turn is [100, n, 101] and an answer of two
    assert int(sample.said.sum()) // 2 == min(answers.TURNS, fit)


def test_what_cannot_be_answered_is_told_or_left_out(llm: LLM, tmp_path: Path) -> None:
    items = [Item("fine"), Item("x" * 500)]
    items += [Item(messages=({"role": role, "content": "x"},)) for role in ("boss", "assistant")]
    for number, bad in enumerate(items[1:]):
        with pytest.raises(ConfigError, match="prompt 2 cannot be answered"):
            written(llm, tmp_path / str(number), [items[0], bad])
    data = DataFolder(tmp_path / "left", about(), ())
    assert write_answers(llm, items, data, True, lambda done: None) == 3
    assert data.shards[0].samples == 1


def test_a_folder_goes_on_only_with_the_same(tiny_llama: Path, tmp_path: Path) -> None:
    file = jsonl(tmp_path / "p.jsonl", *({"prompt": f"{n} is"} for n in range(3)))
    options = DataOptions(prompts=file, context=64, max_tokens=4)
    made = make_data(str(tiny_llama), tmp_path / "data", options, lambda *_: None, print)
    assert made.done == 3
    again = make_data(str(tiny_llama), tmp_path / "data", options, lambda *_: None, print)
    assert again.shards == made.shards
    other = DataOptions(prompts=file, context=64, max_tokens=5)
    with pytest.raises(ConfigError, match="max_tokens is 4, not 5"):
        make_data(str(tiny_llama), tmp_path / "data", other, lambda *_: None, print)


def test_the_target_writes_as_many_prompts_as_it_was_asked_for(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """They fit into a small context, and another number of them is refused."""
    few, more = (DataOptions(context=64, max_tokens=4, samples=count) for count in (3, 4))
    data = make_data(str(tiny_llama), tmp_path, few, lambda *_, **__: None, print)
    assert data.done == 3
    (tmp_path / MANIFEST).unlink()
    with pytest.raises(ConfigError, match="has 3 prompts; give --samples 3"):
        make_data(str(tiny_llama), tmp_path, more, lambda *_, **__: None, print)


def test_time_may_be_limited(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends in time, says so, and the same command goes on."""
    file = jsonl(tmp_path / "p.jsonl", *({"prompt": f"{n} is"} for n in range(200)))
    options = DataOptions(prompts=file, context=64, max_tokens=4)
    clock, told = iter([0, 30, 60]), list[str]()  # 64 prompts in 30 s, so as many in the rest
    monkeypatch.setattr("outrider.training.data.monotonic", lambda: 0.0)
    monkeypatch.setattr(answers, "monotonic", lambda: next(clock))
    minute = replace(options, minutes=1)
    assert make_data(str(tiny_llama), tmp_path, minute, lambda *_: None, told.append).done == 128
    assert told == ["answered 128 of 200 prompts in time; the same command goes on."]
    monkeypatch.setattr(answers, "monotonic", lambda: 0.0)
    assert make_data(str(tiny_llama), tmp_path, options, lambda *_: None, print).done == 200


def test_a_target_writes_fewer_prompts_in_little_time(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most of it here, since prompts are longer than answers."""
    clock = itertools.chain([0.0, 25.0, 45.0], itertools.repeat(60.0))
    monkeypatch.setattr("outrider.training.data.monotonic", lambda: next(clock))
    told = list[int]()

    def tell(done: int, count: int, what: str = "") -> None:
        told.extend([done] if "prompts" in what else [])

    options = DataOptions(context=64, max_tokens=4, samples=5000, minutes=1)
    data = make_data(str(tiny_llama), tmp_path, options, tell, print)
    written = (tmp_path / "prompts.jsonl").read_text().count("\n")
    assert len(told) == 3  # neither 25 s nor 45 are enough
    assert 0 < data.done <= written == told[-1]
    again = make_data(str(tiny_llama), tmp_path, options, lambda *_, **__: None, print)
    assert again.about.num_prompts == written
