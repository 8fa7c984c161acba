"""Builds the tokenizer that the metadata of a GGUF file describes."""

from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)  # fmt: skip
from tokenizers.processors import TemplateProcessing

from ...base.fields import Fields, readable
from ...errors import ModelError, shown
from .gguf import GGUF
from .gguf_ends import end_token_ids

CONTROL, USER_DEFINED = 3, 4
"""Types of tokens that are matched in a text before anything else."""
SPACE = "\u2581"
SPECIALS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
LISTS = {"tokens": str, "merges": str, "scores": float, "token_type": int}
"""The lists of a tokenizer, and the types of their items."""
TEMPLATE = "tokenizer.chat_template"
"""The key of the default chat template; the keys of others append their names."""
LONGEST_PIECE = 256
"""Most characters of a piece that is merged from others; only added tokens are longer."""

# Where a text is split before merges, by llama.cpp's names; the expressions are the models'.
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN2 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_QWEN35 = (  # marks belong to words
    _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
AS_LLAMA3 = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
)  # fmt: skip
WHOLE = (*AS_LLAMA3, "tekken")
"""Pieces that are whole tokens need no merges, and a text begins with BOS."""
COMPOSED = ("qwen2", "qwen35")
"""A text is first normalised to NFC."""
CUTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "granite-docling", "exaone4", "a.x-4.0"),
        (_GPT2,),
    ),
    **dict.fromkeys((*AS_LLAMA3, "smaug-bpe", "dbrx"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), (_QWEN2,)),
    "qwen35": (_QWEN35,),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), (r"\p{N}", _GPT2)),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4"), (_O200K,)),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}


class Words(NamedTuple):
    """A tokenizer with its special tokens by name, its chat templates and the id of its EOS."""

    backend: Tokenizer
    specials: dict[str, Any]
    template: str | dict[str, str] | None
    end: int | None


def gguf_tokenizer(file: GGUF) -> Words | None:
    """Return the tokenizer in ``file``, if it has one."""
    options = {
        key.removeprefix("tokenizer.ggml."): file.metadata[key]
        for key in file.metadata
        if key.startswith("tokenizer.ggml.")
    }
    fields = Fields(options, f"{file.path}: tokenizer.ggml")
    kind = fields.text("model", "none")
    if kind in ("none", "no_vocab"):
        return None
    cut = fields.text("pre", "")
    remedy = "put the model's tokenizer.json beside the file"
    if kind not in ("gpt2", "llama") or (kind == "gpt2" and cut not in CUTS):
        name = f"{shown(kind)} with cuts {shown(cut)}" if kind == "gpt2" else shown(kind)
        raise ModelError(f"{file.path}: its tokenizer, {name}, is not known; {remedy}.")
    _check(file.path, options, fields)
    with readable(f"{file.path}: its tokenizer is damaged", f"{remedy}."):
        backend = _byte_level(options) if kind == "gpt2" else _pieces(options)
        _add_specials(backend, options, kind, end_token_ids(file))
        names = {n: options["tokens"][options[i]] for n, i in SPECIALS.items() if i in options}
        backend.add_special_tokens(
            [AddedToken(token, special=True) for token in dict.fromkeys(names.values())]
        )
        return Words(backend, names, chat_templates(file), options.get("eos_token_id"))


def chat_templates(file: GGUF) -> str | dict[str, str] | None:
    """Return the chat templates in ``file``: the only one, or all by name."""
    templates = {
        key.removeprefix(TEMPLATE).removeprefix(".") or "default": file.fields.text(key)
        for key in file.metadata
        if key == TEMPLATE or key.startswith(f"{TEMPLATE}.")
    }
    templates = {name: template for name, template in templates.items() if template}
    return templates["default"] if list(templates) == ["default"] else templates or None


def _check(path: Path, options: dict[str, Any], fields: Fields) -> None:
    """Refuse lists with items of a wrong type, and ids beyond the vocabulary."""
    for name, kind in LISTS.items():
        items = options.get(name, [])
        if not isinstance(items, list) or not all(isinstance(item, kind) for item in items):
            raise ModelError(f"{path}: tokenizer.ggml.{name} is damaged; fetch the file again.")
    count = len(options.get("tokens", []))
    for name in SPECIALS.values():
        if name in options:
            fields.whole(name, high=max(0, count - 1))


def _byte_level(options: dict[str, Any]) -> Tokenizer:
    """Return a BPE over bytes, like GPT-2's."""
    cut = options["pre"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(options["tokens"])},
            merges=[tuple(merge.split(" ", 1)) for merge in options["merges"]],
            ignore_merges=cut in WHOLE,
        )
    )
    if cut in COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(expression), "isolated") for expression in CUTS[cut]),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pieces(options: dict[str, Any]) -> Tokenizer:
    """Return SentencePiece's BPE, whose merges follow from the scores of the pieces."""
    tokens: list[str] = options["tokens"]
    vocab = {token: i for i, token in enumerate(tokens)}
    lengths = {len(token) for token in tokens}
    merges = []
    for token, score in zip(tokens, options["scores"], strict=True):
        for at in range(1, len(token) if len(token) <= LONGEST_PIECE else 0):
            if at not in lengths or len(token) - at not in lengths:
                continue
            left, right = token[:at], token[at:]
            if left in vocab and right in vocab:
                merges.append((-score, vocab[left], vocab[right], left, right))
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[(left, right) for *_, left, right in sorted(merges)],
            unk_token=tokens[options.get("unknown_token_id", 0)],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = options.get("add_space_prefix", True)
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    )
    back = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        [*back, decoders.Strip(" ", 1, 0)] if prefix else back  # the space put before
    )
    return tokenizer


def _add_specials(
    tokenizer: Tokenizer, options: dict[str, Any], kind: str, ends: frozenset[int]
) -> None:
    """Add the tokens that stay whole, and those that begin and end a text.

    Tokens that end a turn become control tokens, whatever the file says.
    """
    tokens = options["tokens"]
    kinds = dict(enumerate(options.get("token_type") or [])) | dict.fromkeys(ends, CONTROL)
    tokenizer.add_tokens(
        [
            AddedToken(tokens[i], normalized=False, special=kinds[i] == CONTROL)
            for i in sorted(kinds)
            if kinds[i] in (CONTROL, USER_DEFINED) and i < len(tokens)
        ]
    )
    begins = kind == "llama" or options.get("pre") in WHOLE
    around = []
    for flag, default, name in (("bos", begins, "bos_token_id"), ("eos", False, "eos_token_id")):
        adds = options.get(f"add_{flag}_token", default) and name in options
        around.append([(tokens[options[name]], options[name])] if adds else [])
    first, last = ([f"{token}:0" for token, _ in part] for part in around)
    if around[0] or around[1]:
        tokenizer.post_processor = TemplateProcessing(
            single=[*first, "$A:0", *last],
            pair=[*first, "$A:0", *last, *first, "$B:0", *last],
            special_tokens=[*around[0], *around[1]],
        )
