"""The ids of a GGUF file's vocabulary that end a turn."""

from .gguf import GGUF

KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
"""Ids that a file may name; the "fim" ones follow a filled hole: padding or another file."""
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

    Many files name only the base model's EOS, or no end of a turn. So llama.cpp also recognises
    such tokens by their text ("end of generation" in ``llama-vocab.cpp``): this is its list. A
    normal token that merges produce is a word, regardless of its text: Qwen's vocabulary has
    "</s>". Damaged lists of the tokenizer are ignored here; reading the tokenizer refuses them.
    """
    fields, metadata = file.fields, file.metadata
    names = [name for key in KEYS if (name := f"tokenizer.ggml.{key}_token_id") in fields]
    known = metadata.find("tokenizer.ggml.tokens", TEXTS)
    if known.keys() >= HARMONY:
        known.pop("<|end|>", None)
    kinds = metadata.get("tokenizer.ggml.token_type")
    kinds = kinds if isinstance(kinds, list) else []
    normal = {token for token, i in known.items() if i < len(kinds) and kinds[i] == NORMAL}
    if normal:
        ways = {f"{token[:at]} {token[at:]}": token for token in normal for at in range(len(token))}
        made = metadata.find("tokenizer.ggml.merges", ways)
        normal = {ways[merge] for merge in made}
    ends = {i for token, i in known.items() if token not in normal}
    return frozenset({fields.whole(name) for name in names} | ends)
