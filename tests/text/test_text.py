"""Between ids and text: nothing is lost, nothing comes twice, and stop strings end it."""

from __future__ import annotations

import base64
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from outrider.base.types import Request, SamplingParams
from outrider.checkpoints.tokenizers import has_tokenizer, read_codec
from outrider.errors import ModelError, RequestError
from outrider.frontend.outputs import OutputProcessor
from outrider.text.codec import TextCodec, differing_entries
from outrider.text.detokenize import Detokenizer
from outrider.text.places import places_in
from outrider.text.stop import StopFinder

PIECES = ["hello", " wörld", "日本語", "👩‍🔬", "\n\n", "é", "e\u0301", "🙂", " fox", "\ufffd", "𝔘"]


def run(detokenizer: Detokenizer, ids: Sequence[int]) -> tuple[str, bool]:
    """All deltas and the flush, one after the other, and whether a stop string ended it."""
    shown = ""
    for token in ids:
        text, stopped = detokenizer.push(token)
        shown += text
        if stopped:
            return shown, True
    return shown + detokenizer.flush(), False


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    """Words marked by a leading ▁ and bytes as a fallback, as Llama 2 has them."""
    words = ["▁", "▁the", "▁quick", "fox", "▁a", "b"]
    vocabulary = {w: i for i, w in enumerate(["<unk>", *words])}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


@pytest.mark.parametrize("seed", range(5))
def test_deltas_make_the_text(seed: int, tokenizer: Tokenizer) -> None:
    draw = random.Random(seed)
    prompt = tokenizer.encode("".join(draw.choices(PIECES, k=5))).ids
    text = "".join(draw.choices(PIECES, k=60))
    shown, stopped = run(Detokenizer(tokenizer, prompt, ()), tokenizer.encode(text).ids)
    assert not stopped
    assert shown == text


def test_a_character_is_shown_when_it_is_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🙂b").ids
    assert len(ids) == 6
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("x").ids, ())
    assert [detokenizer.push(i)[0] for i in ids] == ["a", "", "", "", "🙂", "b"]
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("seed", range(20))
def test_any_bytes_at_all(seed: int, tokenizer: Tokenizer) -> None:
    """Invalid bytes in the output, at its end, and in the prompt before it."""
    draw = random.Random(seed)
    prompt = draw.choice([[], tokenizer.encode("abc é").ids, tokenizer.encode("x").ids])
    ids = [draw.randrange(3, tokenizer.get_vocab_size()) for _ in range(draw.randrange(1, 60))]
    shown, _ = run(Detokenizer(tokenizer, prompt, ()), ids)
    before, whole = tokenizer.decode(prompt), tokenizer.decode(prompt + ids)
    assert before + shown == whole


class Patient(Detokenizer):
    """Holds tokens back for as long as their text may be unfinished, at whatever cost."""

    def _cut(self, text: str) -> str:
        return ""


RUNS = st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(0, 255), max_size=30)))
"""Runs of bytes, each this often."""


@given(
    bytes_=RUNS, prompt=st.lists(st.integers(0, 255), max_size=8), fallback=st.booleans(),
    words=st.lists(st.integers(0, 2**16), max_size=4),
)  # fmt: skip
@settings(derandomize=True, deadline=None, max_examples=150)
def test_what_waits_is_bounded_and_the_text_is_the_same(
    tokenizer: Tokenizer, sentencepiece: Tokenizer, bytes_: list[tuple[int, list[int]]],
    prompt: list[int], fallback: bool, words: list[int],
) -> None:  # fmt: skip
    used = sentencepiece if fallback else tokenizer
    size = used.get_vocab_size()
    names = [f"<0x{byte:02X}>" if fallback else LETTERS[byte] for byte in range(256)]
    known = [used.token_to_id(name) for name in names]
    ids = [known[byte] for times, run_ in bytes_ for byte in run_ * times]
    for word in words:  # whole words, special tokens and ids beyond the vocabulary between them
        ids.insert(word % (len(ids) + 1), word % (size + 2))
    before = [known[byte] for byte in prompt]
    found = run(Detokenizer(used, before, ()), ids)
    assert found == run(Patient(used, before, ()), ids)
    if not fallback and not before:
        assert found[0] == used.decode(ids)


PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
HIDDEN = [byte for byte in range(256) if byte not in PRINTABLE]
LETTERS = {b: chr(b) for b in PRINTABLE} | {b: chr(256 + i) for i, b in enumerate(HIDDEN)}
"""How byte-level vocabularies write bytes."""


class Counted:
    """A tokenizer that counts the ids that it decodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.count = 0

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        self.count += len(ids)
        text: str = self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize(
    "run_", [b"\xff", b"\x80", b"\xe2", b"\xf0\x9f\x98\xff", b"", "你".encode() + b"\xff"]
)
def test_endless_bytes_that_are_no_text_cost_the_same_each(
    tokenizer: Tokenizer, sentencepiece: Tokenizer, fallback: bool, run_: bytes
) -> None:
    used = sentencepiece if fallback else tokenizer
    names = [f"<0x{byte:02X}>" if fallback else LETTERS[byte] for byte in run_]
    one = [used.token_to_id(name) for name in names]
    ids = (one or [0, used.get_vocab_size() + 5]) * (1000 // len(one or [0, 0]))
    counted = Counted(used)
    shown_text, _ = run(Detokenizer(counted, [], ()), ids)  # type: ignore[arg-type]
    assert shown_text == run(Patient(used, [], ()), ids)[0]
    assert counted.count < 100 * len(ids)


def test_invalid_bytes_at_the_end_are_flushed(tokenizer: Tokenizer) -> None:
    half = tokenizer.encode("🙂").ids[:2]
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("x").ids, ())
    ids = [*tokenizer.encode("ok").ids, *half]
    assert run(detokenizer, ids) == ("ok\ufffd", False)


def test_a_prompt_that_ends_inside_a_character(tokenizer: Tokenizer) -> None:
    smile = tokenizer.encode("🙂").ids
    end = tokenizer.encode(" ok").ids
    prompt = tokenizer.encode("x").ids + smile[:2]
    assert run(Detokenizer(tokenizer, prompt, ()), [*smile[2:], *end]) == ("🙂 ok", False)
    assert run(Detokenizer(tokenizer, prompt, ()), end) == (" ok", False)
    # Nothing but bytes that are no text: neither the prompt's is shown nor the output's lost.
    garbage = [smile[1]] * 8
    shown, _ = run(Detokenizer(tokenizer, garbage, ()), [*end, smile[0]])
    assert shown == " ok\ufffd"


def test_special_tokens_are_not_shown(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("a").ids, 1, 0, *tokenizer.encode("b").ids, 0]
    assert run(Detokenizer(tokenizer, [1], ()), ids) == ("ab", False)


def test_the_first_token_keeps_its_space(sentencepiece: Tokenizer) -> None:
    ids = [sentencepiece.token_to_id(t) for t in ("▁the", "▁quick", "fox", "▁a")]
    assert run(Detokenizer(sentencepiece, ids[:1], ()), ids[1:]) == (" quickfox a", False)
    assert run(Detokenizer(sentencepiece, [], ()), ids) == ("the quickfox a", False)


@pytest.mark.parametrize("seed", range(20))
def test_byte_fallback_with_any_ids(seed: int, sentencepiece: Tokenizer) -> None:
    """What was shown is not taken back, even where later bytes make earlier ones invalid."""
    draw = random.Random(seed)
    names = ["▁the", "fox", "<0x41>", "<0xE2>", "<0x82>", "<0xAC>", "<0xFF>"]
    ids = [sentencepiece.token_to_id(draw.choice(names)) for _ in range(40)]
    prompt = [sentencepiece.token_to_id("▁a")]
    shown, _ = run(Detokenizer(sentencepiece, prompt, ()), ids)
    whole = sentencepiece.decode(prompt + ids)[len("a") :]
    keep = str.maketrans("", "", "\ufffdA€")
    assert shown.translate(keep) == whole.translate(keep)


def outputs_of(tokenizer: Tokenizer) -> OutputProcessor:
    """What writes the tokens of a model with this tokenizer."""

    class Codec:
        backend = tokenizer

    return OutputProcessor(Codec())  # type: ignore[arg-type]


def request(prompt: Sequence[int], **params: Any) -> Request:
    return Request("a", tuple(prompt), SamplingParams(**params), 0, frozenset())


@pytest.mark.parametrize("seed", range(5))
def test_bytes_of_tokens_make_the_text_and_places_are_its_characters(
    seed: int, tokenizer: Tokenizer, sentencepiece: Tokenizer
) -> None:
    draw = random.Random(seed)
    text = "".join(draw.choices(PIECES, k=40))
    of_bytes = [sentencepiece.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
    for each, ids in ((tokenizer, tokenizer.encode(text).ids), (sentencepiece, of_bytes)):
        outputs = outputs_of(each)
        parts = [outputs.bytes_of(id) for id in ids]
        assert b"".join(parts) == text.encode()
        begins = [
            len(b"".join(parts[:i]).decode(errors="ignore")) for i in range(len(parts))
        ]  # fmt: skip
        place = outputs.places(request([each.encode("b").ids[0]]), 7)
        assert [place(id) for id in ids] == [7 + begin for begin in begins]
        assert places_in(text, parts) == begins


def test_a_piece_of_sentencepiece_keeps_its_space(sentencepiece: Tokenizer) -> None:
    outputs = outputs_of(sentencepiece)
    ids = [sentencepiece.token_to_id(word) for word in ("▁the", "fox", "▁", "<0xC3>", "<0xA9>")]
    assert [outputs.bytes_of(id) for id in ids] == [b" the", b"fox", b" ", b"\xc3", b"\xa9"]
    assert [outputs.word(id) for id in ids] == [" the", "fox", " ", "\ufffd", "\ufffd"]
    assert [outputs.piece(id) for id in ids[:3]] == ["▁the", "fox", "▁"]
    place = outputs.places(request(ids[:1]), 0)
    assert [place(id) for id in ids] == [0, 4, 7, 8, 8]


def test_special_tokens_take_no_place_unless_they_are_shown(tokenizer: Tokenizer) -> None:
    outputs, end = outputs_of(tokenizer), tokenizer.token_to_id("<|end|>")
    ids = [*tokenizer.encode("é🙂").ids, end, *tokenizer.encode("x").ids]
    for skip, begin in ((True, 2), (False, 2 + len("<|end|>"))):
        place = outputs.places(request([1], skip_special_tokens=skip), 0)
        assert [place(id) for id in ids][-2:] == [2, begin]


def test_broken_characters_have_places(tokenizer: Tokenizer) -> None:
    outputs = outputs_of(tokenizer)
    by_bytes = {outputs.bytes_of(id): id for id in range(tokenizer.get_vocab_size())}
    parts = [b"a", b"\xf0", b"\x9f", b"b", b"\x80", b"c", b"\xf0"]
    place = outputs.places(request([1]), 0)
    text = b"".join(parts).decode(errors="replace")
    assert text == "a\ufffdb\ufffdc\ufffd"
    assert [place(by_bytes[part]) for part in parts] == [0, 1, 1, 2, 3, 4, 5]
    assert places_in(text, parts) == [0, 1, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("text", "tokens", "places"),
    [
        ("Hello you", ["<s>", " Hello", " you"], [0, 0, 5]),
        ("e\u0301 fox", ["é", " fox"], [0, 2]),
        ("a  b", ["a", " b"], [0, 2]),
        ("<s>a", ["<s>", "<s>", "a"], [0, 3, 3]),
        ("", ["<s>"], [0]),
    ],
)
def test_places_in_a_prompt_that_its_tokens_do_not_spell(
    text: str, tokens: list[str], places: list[int]
) -> None:
    found = places_in(text, [token.encode() for token in tokens])
    assert found[0] == 0
    assert found[-1] == places[-1]
    assert found == sorted(found)


def test_without_a_tokenizer_there_is_no_text() -> None:
    detokenizer = Detokenizer(None, [1, 2], ())
    assert detokenizer.push(3) == ("", False)
    assert detokenizer.flush() == ""


def test_stop_strings_split_over_tokens(tokenizer: Tokenizer) -> None:
    text = "say 🙂STOP🙂 and more"
    ids = tokenizer.encode(text).ids
    for stop in ("STOP", "🙂STOP🙂", " and", "y 🙂"):
        shown = run(Detokenizer(tokenizer, [5], (stop,)), ids)
        assert shown == (text[: text.index(stop)], True)
    assert run(Detokenizer(tokenizer, [5], ("more!", "and  more")), ids) == (text, False)


def test_stop_strings_wait_for_min_tokens(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, [5], ("b",))
    ids = [tokenizer.encode(c).ids[0] for c in "abab"]
    shown = [detokenizer.push(token, may_stop=i > 1) for i, token in enumerate(ids)]
    assert shown == [("a", False), ("b", False), ("a", False), ("", True)]


def test_what_is_held_back_is_released_at_the_end(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, [5], ("end of it",))
    shown = "".join(detokenizer.push(i)[0] for i in tokenizer.encode("the end of").ids)
    assert shown == "the "
    assert detokenizer.flush() == "end of"
    assert detokenizer.flush() == ""


def test_an_unfinished_character_may_complete_a_stop_string(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, [5], ("x\ufffd",))
    ids = [*tokenizer.encode("ax").ids, tokenizer.encode("🙂").ids[0]]
    assert "".join(detokenizer.push(i)[0] for i in ids) + detokenizer.flush() == "a"


def pieces(text: str, draw: random.Random) -> list[str]:
    cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randrange(8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("seed", range(30))
def test_stops_are_found_however_the_text_is_cut(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(50):
        text = "".join(draw.choices("ab", k=draw.randrange(30)))
        sizes = [draw.randint(1, 5) for _ in range(draw.randint(1, 3))]
        stop = ["".join(draw.choices("ab", k=size)) for size in sizes]
        # The earliest to be complete wins, and of these the one that begins first.
        ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
        expected = text[: min(ends)[1]] if ends else text
        finder, shown = StopFinder(stop), ""
        for piece in pieces(text, draw):
            new, stopped = finder.push(piece)
            shown += new
            assert expected.startswith(shown)
            if stopped:
                break
        assert stopped == bool(ends)
        assert shown + finder.flush() == expected
        if stopped:
            assert finder.push("more") == ("", True)


def test_no_more_is_held_back_than_may_become_a_stop() -> None:
    finder = StopFinder(["abc", "cd"])
    assert finder.push("xab") == ("x", False)
    assert finder.push("ab") == ("ab", False)
    assert finder.push("x") == ("abx", False)
    assert finder.push("c") == ("", False)
    assert finder.flush() == "c"
    assert StopFinder([]).push("text") == ("text", False)


def test_differing_entries() -> None:
    target = {"a": 0, "b": 1, "c": 2, "d": 3}
    assert differing_entries(target, dict(target)) == []
    # Padding of either vocabulary is no difference.
    assert differing_entries(target, {**target, "<pad1>": 4, "<pad2>": 5}) == []
    assert differing_entries({**target, "<pad1>": 4}, target) == []
    assert differing_entries(target, {"a": 0, "b": 2, "c": 1, "d": 3}) == [
        "'b' is 2, not 1",
        "'c' is 1, not 2",
    ]
    assert differing_entries(target, {"a": 0, "B": 1, "c": 2, "d": 3}) == [
        "'b' is missing, not 1",
        "'B' is 1, not absent",
    ]
    # Ids may have holes: what counts is where the shorter one ends.
    assert differing_entries({"a": 0, "b": 7}, {"a": 0, "c": 7}) == [
        "'b' is missing, not 7",
        "'c' is 7, not absent",
    ]
    assert differing_entries({"a": 0, "b": 7}, {"a": 7, "b": 0}) != []


def test_differing_entries_of_disjoint_vocabularies() -> None:
    found = differing_entries({f"x{i}": i for i in range(50)}, {f"y{i}": i for i in range(50)})
    assert len(found) == 100


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    for file in tiny_llama.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, tmp_path)
    return tmp_path


def test_the_codec_encodes_as_the_checkpoint_does(folder: Path, tokenizer: Tokenizer) -> None:
    assert has_tokenizer(folder)
    codec = read_codec(folder)
    assert codec.encode("hello fox") == tokenizer.encode("hello fox").ids
    assert codec.encode("") == []
    assert codec.backend.get_vocab() == tokenizer.get_vocab(with_added_tokens=True)
    assert codec.backend.decode(codec.encode("日本")) == "日本"


def test_chats_go_through_the_template(folder: Path) -> None:
    codec = read_codec(folder)
    user, model = (codec.backend.get_vocab()[t] for t in ("<|user|>", "<|model|>"))
    messages = [{"role": "user", "content": "hi"}]
    assert codec.chat(messages) == [user, *codec.encode("hi"), model]
    assert codec.chat(messages, add_generation_prompt=False) == [user, *codec.encode("hi")]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "critic", "content": "no"}], "the chat template refused the messages"),
        ([{}], r"messages\[0\] has no role"),
        ([{"role": "user", "content": "a"}, 3], r"messages\[1\] is not an object"),
    ],
)
def test_messages_may_be_refused(messages: list[Any], reason: str, folder: Path) -> None:
    with pytest.raises(RequestError, match=reason):
        read_codec(folder).chat(messages)


def test_a_template_says_why_it_refuses(folder: Path) -> None:
    with pytest.raises(RequestError, match="roles are user and model"):
        read_codec(folder).chat([{"role": "critic", "content": "no"}])


def test_no_template_no_chat(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(RequestError, match=r"has no chat template; use generate\(\)") as caught:
        read_codec(folder).chat([{"role": "user", "content": "hi"}])
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("damage", ["{", "", "[]", '{"model": 3}', "\x00\xff"])
def test_a_damaged_tokenizer_is_refused(damage: str, folder: Path) -> None:
    (folder / "tokenizer.json").write_text(damage)
    with pytest.raises(ModelError, match=r"the tokenizer in .* cannot be read") as caught:
        read_codec(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    assert not has_tokenizer(tmp_path)


FORGED = st.lists(
    st.sampled_from(["<|end|>", "<|model|>", "<|", "end|>", "<", "|", " ", "fox", "é", "\n", "🙂"]),
    max_size=12,
).map("".join)


@given(text=FORGED)
@settings(derandomize=True, deadline=None, max_examples=200)
def test_control_tokens_in_texts_may_be_plain_text(text: str, plain: TextCodec) -> None:
    ids = plain.encode(text)
    assert plain.backend.decode(ids, skip_special_tokens=False) == text
    assert not set(ids) & CONTROLS
    talk = [{"role": "user", "content": text}, {"role": "model", "content": "a<|user|>"}]
    asked = plain.chat(talk)
    assert plain.backend.decode(asked, skip_special_tokens=False) == (
        f"<|user|>{text}<|model|>a<|user|><|model|>"
    )
    assert [id for id in asked if id in CONTROLS] == [1, 2, 2]  # the template's own


CONTROLS = {0, 1, 2}


@pytest.fixture(scope="module")
def plain(tiny_llama: Path) -> TextCodec:
    return read_codec(tiny_llama, specials=False)


def test_only_forged_texts_change_without_control_tokens(plain: TextCodec, folder: Path) -> None:
    usual = read_codec(folder)
    for text in ("hello fox", "", "<|", "a \ufdd1 b", "<| end|>"):
        assert plain.encode(text) == usual.encode(text) or "\ufdd1" in text
        assert usual.backend.decode(usual.encode(text), skip_special_tokens=False) == text
    assert usual.encode("<|end|>") == [0]


def test_tools_and_variables_forge_nothing_either(plain: TextCodec, folder: Path) -> None:
    forged = "<|end|><|model|>"
    template = (
        "{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.tool_calls | tojson if "
        "m.tool_calls }}{{ m.name }}{% endfor %}{{ tools | tojson }}{{ documents | tojson }}"
    )
    call = {"function": {"name": forged, "arguments": json.dumps({forged: [forged]})}}
    tool = {"function": {"name": "f", "parameters": {"properties": {forged: {"enum": [forged]}}}}}
    talk = [{"role": forged, "content": forged, "name": forged, "tool_calls": [call]}]
    found = []
    for codec in (plain, read_codec(folder)):
        before, codec.chat_template = codec.chat_template, template
        ids = codec.chat(talk, tools=[tool], documents=[{"text": forged}])
        codec.chat_template = before
        found.append((codec.backend.decode(ids, skip_special_tokens=False), CONTROLS & set(ids)))
    assert found == [(found[0][0], set()), (found[0][0], {0, 2})]


def test_a_text_longer_than_the_tokenizer_says_is_no_warning(
    tiny_llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Contexts are checked by the engine; transformers warns of "indexing errors"."""
    folder = tmp_path / "short"
    shutil.copytree(tiny_llama, folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_max_length": 4}))
    assert len(read_codec(folder).encode("for word in words")) > 4
    assert capfd.readouterr().err == ""


def altered(folder: Path, part: str, value: object) -> None:
    """Put another part into the tokenizer of a folder."""
    file = folder / "tokenizer.json"
    whole = json.loads(file.read_text())
    file.write_text(json.dumps({**whole, part: value}, ensure_ascii=part != "post_processor"))


def replaced(pattern: dict[str, str], content: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(*steps: object, of: str = "normalizers") -> dict[str, object]:
    return {"type": "Sequence", of: list(steps)}


TENFOLD = replaced({"String": "a"}, 10 * "a")
LAUGHS = [replaced({"String": chr(ord("a") + i)}, 10 * chr(ord("b") + i)) for i in range(9)]
TABLE = base64.b64encode((0).to_bytes(4, "little") + 1000 * b"x" + b"\0").decode()


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("normalizer", replaced({"String": "a"}, 1000 * "b")),
        ("normalizer", sequence(TENFOLD, TENFOLD, TENFOLD)),
        ("normalizer", sequence(sequence(TENFOLD, TENFOLD), sequence(sequence(TENFOLD)))),
        ("normalizer", sequence(*LAUGHS)),
        ("normalizer", replaced({"Regex": "a*"}, 300 * "b")),
        ("normalizer", replaced({"Regex": "(?=a)"}, 257 * "b")),
        ("normalizer", replaced({"String": ""}, 300 * "b")),
        ("normalizer", sequence({"type": "NFKC"}, TENFOLD, TENFOLD)),
        ("normalizer", {"type": "Prepend", "prepend": 100_000 * "a"}),
        ("normalizer", sequence({"type": "Prepend", "prepend": 1000 * "a"}, TENFOLD, TENFOLD)),
        ("normalizer", sequence(*[{"type": "Precompiled", "precompiled_charsmap": TABLE}] * 2)),
        ("normalizer", sequence(*[replaced({"String": "x"}, "y")] * 2000)),
        ("decoder", sequence(TENFOLD, TENFOLD, TENFOLD, of="decoders")),
        (
            "post_processor",
            {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<|end|>", "type_id": 0}}] * 100,
                "pair": [],
                "special_tokens": {
                    "<|end|>": {"id": "<|end|>", "ids": 100 * [1], "tokens": 100 * ["<|end|>"]}
                },
            },
        ),
    ],
)
def test_a_tokenizer_that_makes_texts_much_longer_is_refused(
    part: str, value: object, folder: Path
) -> None:
    altered(folder, part, value)
    with pytest.raises(
        ModelError, match=r"could make|more than 1000 steps|tokens around"
    ) as caught:
        read_codec(folder)
    assert str(folder) in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "value",
    [
        sequence(  # ALBERT's
            replaced({"String": "``"}, '"'), replaced({"String": "''"}, '"'), {"type": "NFKD"},
            {"type": "StripAccents"}, {"type": "Lowercase"}, replaced({"Regex": " {2,}"}, " "),
        ),
        sequence({"type": "Prepend", "prepend": "▁"}, replaced({"String": " "}, "▁")),
        replaced({"Regex": r"\s+"}, " "),
        sequence(*[replaced({"String": c}, 4 * "-") for c in "\t\v\f\r\n…"]),
        None,
    ],
)  # fmt: skip
def test_usual_normalizers_are_taken(value: object, folder: Path) -> None:
    altered(folder, "normalizer", value)
    assert read_codec(folder).encode("fox")


def test_an_escaped_name_is_seen(folder: Path) -> None:
    altered(folder, "normalizer", sequence(TENFOLD, TENFOLD, TENFOLD))
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"Replace"', '"\\u0052eplace"'))
    with pytest.raises(ModelError, match="could make"):
        read_codec(folder)


def test_a_panic_is_a_refused_text(folder: Path) -> None:
    """An expression that takes too many tries fails on some texts alone."""
    split = {
        "type": "Split",
        "pattern": {"Regex": "(a+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    altered(folder, "pre_tokenizer", split)
    codec, text = read_codec(folder), 40 * "a" + "b"
    assert codec.encode("fox")
    with pytest.raises(RequestError, match=r"the tokenizer fails on this text \(Onig"):
        codec.encode(text)
    with pytest.raises(RequestError, match="the tokenizer fails"):
        codec.exceeds(text, 10)
    with pytest.raises(RequestError, match="the tokenizer fails"):
        read_codec(folder, specials=False).encode(f"<|end|>{text}")


def test_a_panic_over_one_text_ends_no_other() -> None:
    class Panic(BaseException):
        pass

    class Broken:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            if 7 in ids:
                raise Panic("a regex")
            return "x" * len(ids)

    writer = Detokenizer(Broken(), [1], [])  # type: ignore[arg-type]
    assert [writer.push(token)[0] for token in (2, 7, 3)] == ["x", "", ""]
    assert writer.flush() == "\ufffd"
