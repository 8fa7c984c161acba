"""Hostile specs, and readers of rendered files that share no code with what writes them."""

from __future__ import annotations

import json
import random
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

TEXTS = (
    "org/model", "no", "y", "off", "null", "~", "1e3", "0x1F", "017", "1_000", ".5", "1:30", "+1",
    "-1", "2024-01-01", "<<", "=", "a: b", "a #b", "# a", "- a", "? a", "*a", "&a b", "!a", "%a",
    "@a", "[a]", "{a: 1}", "a,b", "|", ">", "'", '"', "\\", "a\\nb", "a'b\"c", "$a", "$$", "$$(A)",
    "$(A)", "${{ a }}", "${A:-b}", "`echo a`", "a;echo b", "a&&b", "a|b", "a > b", "!!", "!x",
    "{{ 7*7 }}", "{% raw %}", "ä €", "名前", "😀", "e\u0301", "a\nb", "a\r\nb", "a\0b", "a\tb",
    "\x1b[31m", "\u2028", "\u00a0", "\ufeff", "\u202ea", "\x7f", "\x85", " a", "a ", " ", "", "a b",
    "/models/a b", "/models/../a", "./a", "../a", "~/a", "/tmp/a", "[::1]:8000/a", "::1",
    "http://a/b?c=d&e", "a" * 300, "a/" * 2000, "--help", "-", "a=b", "A=b", "%s", "a%20b", "\\x41",
    "EOF", "true", "None", "NaN", "inf",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    True, False, 0, 1, -1, 2, 65535, 65536, 2**31, 2**63, -(2**70), 10**5000, 0.5, 1.0, -0.0, 1e-9,
    1e300, float("nan"), float("inf"), [], [1], {}, {"a": 1}, [[1, 4, 2]], [[1, 8, 0]],
    [[1, 1, True]], [["1", 2, 3]], [[1, 2**40, 4], [2**40 + 1, 2**41, 1]],
)  # fmt: skip
FIELDS: dict[str, tuple[str, ...]] = {
    "target": ("model", "revision", "dtype", "quantization", "attention_heads", "vocab_size",
               "weights_gib"),
    "drafter": ("method", "model", "num_speculative_tokens", "schedule", "required", "adaptive",
                "tensor_parallel_size", "quantization", "other_vocabulary", "vocab_size",
                "attention_heads",
                "weights_gib", "prompt_lookup_min", "prompt_lookup_max"),
    "parallel": ("tensor", "pipeline"),
    "limits": ("max_model_len", "max_num_seqs", "max_num_batched_tokens"),
    "memory": ("gpu_share", "gpu_gib"),
    "service": ("name", "namespace", "model_name", "port", "replicas", "image"),
}  # fmt: skip
FREE = (
    ("target", "model"), ("target", "revision"), ("drafter", "model"), ("service", "model_name"),
    ("service", "image"), ("service", "name"), ("service", "namespace"),
)  # fmt: skip
"""Fields that take any text of one line, or nearly any."""


def spoiled(document: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return a copy of a sane document with one to three fields that hold hostile values."""
    made = {key: dict(v) if isinstance(v, dict) else v for key, v in document.items()}
    for _ in range(rng.randint(1, 3)):
        hostile = rng.random()
        if hostile < 0.03:
            made[str(rng.choice(TEXTS))] = rng.choice(VALUES)
        elif hostile < 0.06:
            made[rng.choice([*FIELDS, "engine_version", "engine"])] = rng.choice(VALUES)
        elif hostile < 0.09:
            made["engine_version"] = rng.choice(TEXTS)
        else:
            section, field, value = _spoiled_field(rng)
            table = made.setdefault(section, {})
            if isinstance(table, dict):
                table[field] = value
    return made


def _spoiled_field(rng: random.Random) -> tuple[str, str, Any]:
    """Return a section, a field of it and its value: mostly a text where texts are due."""
    if rng.random() < 0.7:
        section, field = rng.choice(FREE)
        return section, field, rng.choice(TEXTS)
    section = rng.choice(list(FIELDS))
    return section, rng.choice(FIELDS[section]), rng.choice(TEXTS + VALUES)


def words_of_shell(text: str) -> list[str]:
    """Return the words of a script of one command, as ``shlex`` reads them."""
    return shlex.split(text.replace("\\\n", ""), comments=True)


def words_of_kubernetes(words: list[str]) -> list[str]:
    """Return a container's command as the kubelet expands it where no variable is known."""

    def expanded(word: str) -> str:
        out, at = "", 0
        while at < len(word):
            if word.startswith("$$", at):
                out, at = out + "$", at + 2
            elif word.startswith("$(", at) and ")" in word[at:]:
                raise AssertionError(f"a variable is left in {word!r}")
            else:
                out, at = out + word[at], at + 1
        return out

    return [expanded(word) for word in words]


def text_of_compose(text: str) -> str:
    """Return a text as compose interpolates it where no variable is known."""
    assert not re.search(r"(?<!\$)(\$\$)*\$(?!\$)", text), f"a variable is left in {text!r}"
    return text.replace("$$", "$")


OTHERWISE = re.compile(
    r"[-+]?(\.[0-9_]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?"
    r"|[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?|[-+]?0([bo][0-7_]+|x[0-9a-f_]+)"
    r"|[-+]?\.inf|\.nan|y|n|yes|no|on|off|true|false|null|~|<<|=",
    re.I,
)
"""Plain scalars that one version of YAML or another reads as no text."""


def documents(text: str) -> list[Any]:
    """Return the documents of a YAML text, whose plain texts all versions of YAML read as texts."""
    for node in yaml.compose_all(text, yaml.SafeLoader):
        for scalar in scalars(node):
            plain = scalar.style is None and scalar.tag == "tag:yaml.org,2002:str"
            assert not (plain and OTHERWISE.fullmatch(scalar.value)), scalar.value
    return list(yaml.safe_load_all(text))


def scalars(node: yaml.Node | None) -> Iterator[yaml.ScalarNode]:
    """Yield all scalars below a node."""
    if isinstance(node, yaml.ScalarNode):
        yield node
    elif isinstance(node, yaml.SequenceNode):
        for each in node.value:
            yield from scalars(each)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from scalars(key)
            yield from scalars(value)


def environment(text: str) -> list[str]:
    """Return the values of an env file, and the words of flags that its comments leave over.

    Docker, compose and systemd read such values alike.
    """
    found = []
    for line in text.splitlines():
        if line.startswith("# -"):
            found += shlex.split(line.removeprefix("# "))
        elif line and not line.startswith("#"):
            name, _, value = line.partition("=")
            assert re.fullmatch(r"[A-Z_]+", name), line
            assert not re.search(r"[\"'\\$`#\s]", value), line
            found.append(value)
    return found


def leaves(value: Any) -> Iterator[Any]:
    """Yield all values within lists and tables; a text that holds JSON counts as its contents."""
    if isinstance(value, Mapping):
        for each in value.values():
            yield from leaves(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from leaves(each)
    else:
        yield value
        if isinstance(value, str) and value.startswith("{"):
            try:
                yield from leaves(json.loads(value))
            except ValueError:
                return


def parsed(name: str, text: str) -> Any:
    """Return the contents of a rendered file by its name; fails where it does not parse."""
    if name.endswith(".yaml"):
        return documents(text)
    if name.endswith(".json"):
        return json.loads(text)
    if name.endswith(".toml"):
        return tomllib.loads(text)
    if name.endswith(".env"):
        return environment(text)
    if name.endswith(".sh"):
        return words_of_shell(text)
    assert name.endswith(".pbtxt"), name
    return text
