"""The intersection of two vocabularies, and a text in another tokenizer's ids."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from outrider import LLM, SamplingParams
from outrider.drafters.registry import find_drafter
from outrider.drafters.retokenize import RetokenizeSpec
from outrider.errors import ConfigError, ModelError
from outrider.text.intersection import byte_level, intersection, pieces_of
from outrider.text.reencode import Context, Reencoder, num_unfinished

if TYPE_CHECKING:
    from tests.support.tiny import MakeCheckpoint

TEXT = [
    "the quick brown fox jumps over the lazy dog, and the naïve café said: “no” 日本語 😀👍🏽",
    "def f(x):\n    return x + 1\n\n# ünïcödé — dashes… 🚀 über alles, the other the then there",
]
SPACE = "▁"


def trained(size: int, specials: list[str], text: list[str] = TEXT) -> Tokenizer:
    """A byte-level tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer


def sentencepiece(dummy: bool = True) -> Tokenizer:
    """A tokenizer as those of Llama 2: spaces are marked, unknown characters become bytes."""
    words = ["the", "quick", "fox", "th", "he", "over", "return", "é", "日", "an", "and", "s"]
    singles = sorted({*"".join(TEXT), *"abcdefghijklmnopqrstuvwxyz"} - {" ", "😀", "\n", "ü"})
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), SPACE, "\n"]
    names += [each for each in (*singles, *words) if each not in names]
    names += [SPACE + each for each in (*words, *"abct") if SPACE + each not in names]
    names += ["qu", "qui", "quic", "fo", "ov", "ove", "re", "ret", "retu", "retur"]
    names = [*dict.fromkeys(names)]
    vocabulary = {name: id for id, name in enumerate(names)}
    merges = [
        (name[:cut], name[cut:])
        for name in names[259:]
        for cut in range(1, len(name))
        if name[:cut] in vocabulary and name[cut:] in vocabulary
    ]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(SPACE)] if dummy else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    return tokenizer


def reencoder(target: Tokenizer, drafter: Tokenizer) -> Reencoder:
    theirs = pieces_of(target, target.get_vocab_size(), "the target")
    ours = pieces_of(drafter, drafter.get_vocab_size(), "the drafter")
    return Reencoder(target, drafter, theirs, ours, intersection(theirs, ours))


def test_bytes_of_byte_level_tokens() -> None:
    assert sorted(byte_level().values()) == [*range(256)]
    tokenizer = trained(320, ["<|end|>"])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    pieces = pieces_of(tokenizer, 330, "it")
    assert len(pieces.tokens) == 330
    for text in TEXT:
        ids = tokenizer.encode(text).ids
        assert b"".join(pieces.tokens[id] for id in ids) == text.encode()
    end, tool = tokenizer.token_to_id("<|end|>"), tokenizer.token_to_id("<tool>")
    assert end in pieces.special
    assert b"<|end|>" not in pieces.ids
    assert pieces.ids[b"<tool>"] == tool


def test_bytes_of_sentencepiece_tokens() -> None:
    tokenizer = sentencepiece()
    pieces = pieces_of(tokenizer, tokenizer.get_vocab_size(), "it")
    for text in TEXT:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert b"".join(pieces.tokens[id] for id in ids) == b" " + text.encode()
    # The newline has a token of its own beside that of its byte, which comes second.
    assert pieces.ids[b"\n"] == tokenizer.token_to_id("\n")
    assert pieces.ids[b"\xff"] == tokenizer.token_to_id("<0xFF>")
    assert pieces.ids[b" the"] == tokenizer.token_to_id("▁the")
    metaspace = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁the", -1.0), ("x", -2.0)], 0))
    metaspace.decoder = decoders.Metaspace()
    assert pieces_of(metaspace, 3, "it").tokens[1:] == [b" the", b"x"]


def test_an_intersection_is_one_to_one_and_of_the_same_bytes() -> None:
    target, drafter = trained(400, ["</s>", "<|a|>"]), sentencepiece()
    theirs = pieces_of(target, 410, "the target")
    ours = pieces_of(drafter, 400, "the drafter")
    shared = intersection(theirs, ours)
    assert len(shared.targets) == 400
    assert len(shared.inputs) == 410
    pairs = [(own, id) for own, id in enumerate(shared.targets) if id >= 0]
    assert len({id for _, id in pairs}) == len(pairs) == shared.count > 256
    for own, id in pairs:
        assert ours.tokens[own] == theirs.tokens[id] != b""
        assert shared.inputs[id] == own
        assert own not in ours.special
        assert id not in theirs.special
    assert {theirs.tokens[id] for _, id in pairs} == theirs.ids.keys() & ours.ids.keys()
    assert target.token_to_id("</s>") not in {id for _, id in pairs}
    of_target, of_drafter = shared.shares
    assert of_target == shared.count / 408 - 0 if len(theirs.ids) == 408 else of_target < 1
    assert 0 < of_drafter < 1
    assert f"{shared.count} tokens are in both" in str(shared)


def test_a_tokenizer_without_bytes_is_refused() -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, "a"))
    with pytest.raises(ModelError, match="tokenizer of it is neither byte-level nor"):
        pieces_of(words, 2, "it")
    words.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match="neither byte-level nor SentencePiece"):
        pieces_of(words, 2, "it")


PAIRS = {
    "byte-level": lambda: (trained(380, ["<|end|>", "<|user|>"]), trained(330, ["<|end|>"])),
    "few": lambda: (trained(420, ["<|end|>", "<|user|>"]), trained(270, ["</s>"], ["abc"])),
    "to sentencepiece": lambda: (trained(380, ["<|end|>", "</s>"]), sentencepiece()),
    "to gemma's": lambda: (trained(380, ["<|end|>", "</s>"]), sentencepiece(dummy=False)),
    "from sentencepiece": lambda: (sentencepiece(), trained(330, ["</s>"])),
    "two of them": lambda: (sentencepiece(), sentencepiece(dummy=False)),
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("seed", range(8))
def test_a_context_says_the_text_of_the_target(pair: str, seed: int) -> None:
    """For any tokens, split characters and specials among them, taken at any pace."""
    target, drafter = PAIRS[pair]()
    rng, writer = random.Random(seed), reencoder(target, drafter)
    theirs, ours = writer._theirs, writer._ours
    text = [target.encode(each, add_special_tokens=False).ids for each in TEXT]
    tokens: list[int] = []
    for _ in range(40):
        start = rng.randrange(len(text[0]) - 5)
        tokens += rng.choice(text)[start : start + rng.randrange(1, 12)]
        if seed % 2:
            tokens.append(rng.randrange(len(theirs.tokens)))
    single = writer.take(Context(0), tokens, 10_000)
    assert single == len(tokens)
    # A prompt that ends within a character leaves its bytes waiting.
    context = Context(rng.choice((1, 7, len(tokens) // 2)))
    begin, spaced = len(writer._our_begin), reencoder(drafter, target)._spaced
    while context.taken < len(tokens):
        known = tokens[: max(context.at_once, context.taken + rng.randrange(1, 9))]
        before = list(context.ids)
        writer.take(context, known, rng.choice((1, 3, 50)))
        assert context.ids[: len(before)] == before
        expected = b"".join(theirs.tokens[id] for id in tokens[: context.taken])
        found = b"".join(ours.tokens[id] for id in context.ids[begin:]) + context.pending
        expected = expected.removeprefix(b" ") if writer._spaced else expected
        found = found.removeprefix(b" ") if spaced else found  # before the first word
        assert found.decode(errors="replace") == expected.decode(errors="replace")
        assert len(context.pending) < 4
        assert num_unfinished(context.pending) == len(context.pending)


def test_shared_tokens_keep_their_ids_behind_a_prompt() -> None:
    target, drafter = PAIRS["byte-level"]()
    writer = reencoder(target, drafter)
    ids = target.encode(TEXT[0]).ids
    shared = [id for id in ids if writer.shared.inputs[id] >= 0]
    context = Context(len(ids))
    writer.take(context, ids, 10_000)
    assert context.ids == drafter.encode(TEXT[0]).ids
    prompt = len(context.ids)
    writer.take(context, ids + shared, 10_000)
    assert context.ids[prompt:] == [writer.shared.inputs[id] for id in shared]
    assert context.taken == len(ids) + len(shared)


def test_specials_are_those_of_the_same_name_and_a_text_begins_as_ours_do() -> None:
    target, drafter = sentencepiece(), trained(330, ["</s>", "<|begin|>"])
    begin = drafter.token_to_id("<|begin|>")
    drafter.post_processor = processors.TemplateProcessing(
        "<|begin|> $A", None, [("<|begin|>", begin)]
    )
    writer, end = reencoder(target, drafter), target.token_to_id("</s>")
    context = Context(3)
    writer.take(context, [target.token_to_id("<s>"), target.token_to_id("the"), end], 10)
    assert context.ids == [begin, *drafter.encode("the", add_special_tokens=False).ids,
                           drafter.token_to_id("</s>")]  # fmt: skip
    writer.take(context, [1, 1, 1, end, target.token_to_id("<s>")], 10)
    spelled = drafter.encode("<s>", add_special_tokens=False).ids
    assert context.ids[-1 - len(spelled) :] == [drafter.token_to_id("</s>"), *spelled]


class Read(list[int]):
    """Tokens that count how many of them are looked at."""

    count = 0

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.count += len(found) if isinstance(place, slice) else 1
        return found


def test_the_work_of_a_token_does_not_grow_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks at no token before, and encodes a few characters."""
    target, drafter = PAIRS["few"]()
    writer, ids = reencoder(target, drafter), Read(target.encode(" ".join(TEXT)).ids * 400)
    context = Context(len(ids) - 2000)
    steps = 0
    while context.taken < context.at_once:
        assert writer.take(context, ids, 1024) <= 1024
        steps += 1
    assert steps == -(-context.at_once // 1024)
    written, ids.count, lengths = context.ids, 0, [0]
    encoded = type(writer)._encoded

    def encode(self: Any, text: str) -> list[int]:
        lengths.append(len(text))
        return encoded(self, text)

    monkeypatch.setattr(type(writer), "_encoded", encode)
    for _ in range(900):
        writer.take(context, ids, 1)
    assert context.ids is written
    assert ids.count == 900
    assert max(lengths) < 64


def test_the_option_names_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "a+b"
    folder.mkdir()
    for option in (f"retokenize:{folder}", f"retokenize:{tmp_path}"):
        spec = find_drafter(option, tmp_path)
        assert isinstance(spec, RetokenizeSpec)
        assert spec.folder == Path(option.removeprefix("retokenize:"))
    merged = find_drafter(f"retokenize:{tmp_path}+ngram", tmp_path)
    assert merged.name == "retokenize+ngram"
    auto = find_drafter(f"auto+retokenize:{tmp_path}", tmp_path)
    assert [each.name for each in auto.members] == ["suffix", "retokenize"]
    for option in ("retokenize", "retokenize:"):
        with pytest.raises(ConfigError, match=r"wants a folder; give retokenize:PATH"):
            find_drafter(option, tmp_path)


def test_another_tokenizer_is_refused_by_name_and_taken_by_form(
    tiny_llama: Path, tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    other = make_checkpoint(tmp_path / "other", "llama", tokenizer=True)
    file = other / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(content))
    with pytest.raises(ModelError, match=rf"drafter='retokenize:{other}'"):
        LLM(tiny_llama, drafter=other)
    free = SamplingParams(max_tokens=20)
    options: dict[str, Any] = {"memory": 2**24, "dtype": "float32", "seed": 3}
    texts = [
        [out.outputs[0].text for out in llm.generate(["the fox 😀", "def"], free)]
        for drafter in (None, f"retokenize:{other}")
        for llm in [LLM(tiny_llama, drafter=drafter, **options)]
    ]
    assert texts[0] == texts[1]
