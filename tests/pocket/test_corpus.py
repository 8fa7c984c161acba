"""The pocket pair's text: which modules it takes, its tokenizer, and what batches are cut from."""

from pathlib import Path

import numpy as np
import pytest

from outrider.pocket import corpus
from outrider.pocket.corpus import END, SPECIALS, Module, encode, train_tokenizer, windows

HELD_OUT = next(name for name in map("m{}.py".format, range(1000)) if Module(name, "").held_out)
TEXT = "def add(a, b):\n    return a + b\n\n\nclass Größe:\n    pass\n"


def test_modules_of_code_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "b.py": b"b = 1\n", "a/c.py": b"c = 1\n", "empty.py": b" \n", "latin.py": b"x = '\xe4'\n",
        "encodings/table.py": b"t = 1\n", "a/site-packages/d.py": b"d = 1\n",
        "large.py": b"#" * (corpus.LARGEST_MODULE + 1), "text.txt": b"no code\n",
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    assert [*corpus.standard_library()] == [Module("a/c.py", "c = 1\n"), Module("b.py", "b = 1\n")]


def test_one_module_in_forty_is_held_out_by_its_path() -> None:
    paths = [f"package/module_{i}.py" for i in range(4000)]
    held_out = [path for path in paths if Module(path, "x").held_out]
    assert 60 < len(held_out) < 140
    assert held_out == [path for path in paths if Module(path, "another text").held_out]


def test_texts_come_back_from_their_tokens() -> None:
    tokenizer = train_tokenizer([TEXT] * 4)
    assert len(tokenizer) <= corpus.VOCAB_SIZE
    assert tokenizer.convert_tokens_to_ids(SPECIALS) == [*range(len(SPECIALS))]
    for text in (TEXT, "漢字 😀\t\n  x"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert asked == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_each_module_ends_and_the_held_out_are_apart() -> None:
    tokenizer = train_tokenizer([TEXT])
    data = encode(tokenizer, [Module("a.py", TEXT), Module(HELD_OUT, "ä = 1\n")])
    assert not Module("a.py", "").held_out
    assert [tokenizer.decode(ids) for ids in data.train] == [TEXT + END]
    assert [tokenizer.decode(ids) for ids in data.held_out] == ["ä = 1\n" + END]
    assert data.held_out_bytes == 7
    assert data.train_tokens == len(data.train[0])


def test_windows_are_cut_from_the_documents() -> None:
    documents = [np.arange(start, start + count) for start, count in ((0, 50), (100, 33), (200, 9))]
    cut = windows(documents, 8, seed=3)
    assert cut.shape[1] == 8
    assert 92 - 2 * 8 < cut.size <= 92
    assert len({*cut.flatten().tolist()}) == cut.size  # no token comes twice
    for row in cut:
        breaks = np.flatnonzero(np.diff(row) != 1)
        assert all(row[at] in (49, 132, 208) and row[at + 1] in (0, 100, 200) for at in breaks)
    assert np.array_equal(cut, windows(documents, 8, seed=3))
    assert not np.array_equal(cut, windows(documents, 8, seed=4))
