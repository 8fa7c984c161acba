"""Finds the tokens that end a turn in the metadata of a GGUF file.

Many files name only the base model's EOS, or no end of a turn at all. So llama.cpp also recognises
such tokens by their texts (``llama-vocab.cpp``, "end of generation"), and this is its list.
"""

from typing import Any

from .gguf import GGUF

KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
"""Ids that a file may name; padding or another file follows where a hole was filled."""
TEXTS = frozenset(
    {
        "<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end|>",
        "<end_of_turn>", "<end_of_utterance>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>",
        "<eos>", "</s>", "[EOS]", "<EOT>", "_<EOT>", "[EOT]", "<turn|>", "<|tool_response>", "[e~[",
        "<｜end▁of▁sentence｜>",
        "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]",
        "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
    }
)  # fmt: skip
HARMONY = {"<|return|>", "<|call|>"}
"""In vocabularies that have these, "<|end|>" ends a message but not a turn."""
NORMAL = 1


def end_token_ids(file: GGUF) -> frozenset[int]:
    """Return the ids that end a turn: those that the file names, and those known by their text.

    A normal token that merges produce is a word, whatever its text: Qwen's vocabulary has "</s>".
    Damaged lists of the tokenizer are ignored here; reading the tokenizer refuses them.
    """
    fields = file.fields
    names = [name for key in KEYS if (name := f"tokenizer.ggml.{key}_token_id") in fields]
    tokens, kinds, merges = (_listed(file, name) for name in ("tokens", "token_type", "merges"))
    known = {token: i for i, token in enumerate(tokens) if token in TEXTS}
    if known.keys() >= HARMONY:
        known.pop("<|end|>", None)
    normal = {token for token, i in known.items() if i < len(kinds) and kinds[i] == NORMAL}
    if normal:
        normal &= {str(merge).replace(" ", "", 1) for merge in merges}
    ends = {i for token, i in known.items() if token not in normal}
    return frozenset({fields.whole(name) for name in names} | ends)


def _listed(file: GGUF, name: str) -> list[Any]:
    value = file.metadata.get(f"tokenizer.ggml.{name}")
    return value if isinstance(value, list) else []
