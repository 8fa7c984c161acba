"""Hypothesis strategies of what hostile or broken peers send: changed trees, damaged texts."""

from __future__ import annotations

import copy
import json
import re
import tomllib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

MOST_BYTES = 3 << 20
"""Of one input; a reader's own bound may be lower."""
Spot = tuple[Any, ...]

RAW = {
    "@inf@": "1e999", "@-inf@": "-1e999", "@digits@": "9" * 5000, "@nan@": "NaN",
    "@twice@": '{"a":1,"a":2}', "@deep@": "[" * 3000 + "]" * 3000, "@open@": "[" * 50_000,
    "@objects@": '{"a":' * 20_000, "@zeros@": "007", "@word@": "nul", "@tiny@": "1e-5000",
    "@hex@": "0x7fffffffffffffff", "@wide@": "[" + "{}," * 30_000 + "{}]",
}  # fmt: skip
"""What JSON's writer does not write, by the text that stands for it."""
TEXTS = (
    "", " ", "\n", "\0", "a\nb", "a\r\n\r\nb: c", "\x1b[31mred\x1b[0m", "\x1b]0;title\x07",
    "\u2028", "\u202egnp.exe", "\ufeff", "\ud800", "a\udfffb", "\x7f", "\x85", "é" * 200, "😀" * 50,
    "a" * 70_000, "x" * 1_000_000, "../" * 20, "/dev/zero", "/proc/self/environ", "null", "true",
    "nan", "-inf", "1e999", "٣", "-1", "0x10", "1_000", "%s%n", "{0.__class__}", "{{ 7 * 7 }}",
    "${HOME}", "$(id)", "`id`", "'; --", '"', "\\", "<script>", "http://[::1", "http://a:99999",
    "tcp:a:b", "(a+)+$", "[", "(?P<n>", "*" * 300, "0" * 5000, "none", "__class__",
)  # fmt: skip
NUMBERS = (
    -1, 0, 1, 2, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63),
    10**30, 10**308, 10**309, 10**400, -0.0, 0.5, 1.5, -1.5, 1e-320, 5e-324, 1e38, 1e300, 1e308,
    -1e308,
)  # fmt: skip
LEAVES: SearchStrategy[Any] = st.one_of(
    st.sampled_from([None, True, False]), st.sampled_from(NUMBERS), st.sampled_from(TEXTS),
    st.sampled_from(list(RAW)), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=20),
)  # fmt: skip
VALUES: SearchStrategy[Any] = st.one_of(
    LEAVES,
    st.sampled_from([[], {}, [[]], [{}], [None], {"": {}}, {"a": 1}, [1] * 3000, ["a"] * 3000]),
    st.lists(LEAVES, max_size=4),
    st.dictionaries(st.sampled_from(TEXTS[:40]), LEAVES, max_size=4),
    st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3), max_leaves=8),
    st.integers(1, 400).map(lambda depth: _nested(depth)),
)
GONE = object()


def _like(value: Any) -> SearchStrategy[Any]:
    """Values of the same type as one, which a reader may well take."""
    match value:
        case bool():
            return st.booleans()
        case int():
            return st.one_of(st.integers(0, 300), st.sampled_from(NUMBERS), st.integers())
        case float():
            return st.one_of(st.floats(0, 2), st.sampled_from(NUMBERS), st.floats())
        case str():
            return st.one_of(st.sampled_from(TEXTS), st.text(max_size=20))
        case list():
            return st.sampled_from([[], value[::-1], value * 2, value * 1000])
        case dict():
            return st.sampled_from([{}, {"": value}, {**value, "other": value}])
        case _:
            return LEAVES


def _nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def _spots(tree: Any, at: Spot = ()) -> dict[Spot, Any]:
    found = {at: tree}
    if isinstance(tree, dict):
        for key, value in tree.items():
            found |= _spots(value, (*at, key))
    elif isinstance(tree, list):
        for place, value in enumerate(tree[:20]):
            found |= _spots(value, (*at, place))
    return found


def _changed(tree: Any, changes: Sequence[tuple[Spot, Any, str | None]]) -> Any:
    """Return a copy whose spots hold other values, are gone, or have a sibling of another name."""
    tree = copy.deepcopy(tree)
    for spot, drawn, name in changes:
        value = drawn if drawn is GONE else copy.deepcopy(drawn)
        if not spot:
            tree = value if value is not GONE else {}
            continue
        holder = tree
        try:
            for key in spot[:-1]:
                holder = holder[key]
            if name is not None and isinstance(holder, dict):
                holder[name] = value if value is not GONE else None
            elif value is GONE:
                del holder[spot[-1]]
            else:
                holder[spot[-1]] = value
        except (LookupError, TypeError):
            continue  # an earlier change took it away
    return tree


def trees(*samples: Any, values: SearchStrategy[Any] = VALUES) -> SearchStrategy[Any]:
    """Samples with one to three places changed, or something else altogether."""
    names = st.one_of(st.none(), st.none(), st.none(), st.sampled_from(TEXTS))

    def of(sample: Any) -> SearchStrategy[Any]:
        # The root itself is changed now and then only: little is read of what is no object.
        spots = _spots(sample)
        inner = list(spots)[1:] or [()]
        where = st.one_of(*[st.sampled_from(inner)] * 9, st.just(()))
        wild = st.tuples(where, st.one_of(*[values] * 5, st.just(GONE)), names)
        kin = st.one_of([st.tuples(st.just(at), _like(spots[at]), st.none()) for at in inner])
        changes = st.lists(kin | wild, min_size=1, max_size=3) | st.lists(kin, max_size=3)
        return changes.map(partial(_changed, sample))

    return st.one_of(*map(of, samples))


def as_json(tree: Any) -> bytes:
    """A tree as JSON, with what JSON's writer does not write."""
    text = json.dumps(tree, default=repr)
    for name, raw in RAW.items():
        text = text.replace(f'"{name}"', raw)
    return text.encode()


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, str):
        return RAW.get(value, json.dumps(value))
    return repr(value).lower() if value is not None else "none"


def as_toml(tree: Any) -> bytes:
    """A tree as TOML, or something near it."""
    if not isinstance(tree, dict):
        return _toml(tree).encode()
    return "".join(f"{json.dumps(key)} = {_toml(value)}\n" for key, value in tree.items()).encode()


WORD = re.compile(rb"[\w.+-]+")
PIECES: tuple[bytes, ...] = (
    *(text.encode("utf-8", "surrogatepass") for text in TEXTS),
    *(raw.encode() for raw in RAW.values()),
    *(repr(number).encode() for number in NUMBERS),
    b"\xff\xfe", b"\xc0\x80", b"\xed\xa0\x80", b'"\\ud800"', b'"\\u0000"', b"\r", b"\r\n", b"\n\n",
    b"\t", b"{", b"}", b"[", b"]", b"]]>", b"'''", b'"""', b"#", b"//", b"<<: *a", b"&a [*a, *a]",
    b"*a", b"!!python/object/apply:os.system [id]", b"? [a, b]\n: c", b"%YAML 9.9", b"---\n",
    b"...\n",
    b"a." * 5000 + b"a = 1\n", b"[[a]]\n", b"[a.b.c]\n", b"a = {" * 2000, b"- " * 2000, b"(" * 3000,
    b"a: 1" + b":59" * 9000, b"? " * 5000, b"[" + b"[]," * 50_000 + b"[]]", b'"' * 10_000,
    b"x\n" * 100_000, b"a b " * 50_000, b"data: {}\n\n" * 2000, b"\\\n" * 3000, b"$(" * 500,
)  # fmt: skip


def _near(data: bytes, at: float) -> tuple[int, int]:
    """The word at or after a place, else the place itself."""
    place = int(at * len(data))
    found = WORD.search(data, place)
    return found.span() if found else (place, place)


def _replace(data: bytes, at: float, piece: bytes) -> bytes:
    start, end = _near(data, at)
    return data[:start] + piece + data[end:]


def _insert(data: bytes, at: float, piece: bytes) -> bytes:
    place = int(at * len(data))
    return data[:place] + piece + data[place:]


def _repeat(data: bytes, at: float, piece: bytes) -> bytes:
    """A line, or all of it, again and again."""
    lines = data.split(b"\n")
    line = lines[int(at * (len(lines) - 1))]
    count = 2 + len(piece) % 3000
    return data + b"\n" + b"\n".join([line] * min(count, 1 + MOST_BYTES // (len(line) + 1)))


DAMAGE: dict[str, Callable[[bytes, float, bytes], bytes]] = {
    "replace": _replace,
    "insert": _insert,
    "repeat": _repeat,
    "cut": lambda data, at, piece: data[: int(at * len(data))],
    "behead": lambda data, at, piece: data[int(at * len(data)) :],
    "end": lambda data, at, piece: data[: int(at * len(data))] + piece,
    "twice": lambda data, at, piece: data + data[int(at * len(data)) :],
    "flip": lambda data, at, piece: bytes(
        byte ^ (place == int(at * len(data))) << (len(piece) % 8) for place, byte in enumerate(data)
    ),
    "bom": lambda data, at, piece: b"\xef\xbb\xbf" + data,
    "wide": lambda data, at, piece: data.decode("utf-8", "replace").encode("utf-16"),
    "dos": lambda data, at, piece: data.replace(b"\n", b"\r\n"),
    "mac": lambda data, at, piece: data.replace(b"\n", b"\r"),
    "flat": lambda data, at, piece: re.sub(rb"\n[ \t]+", b"\n", data),
    "joined": lambda data, at, piece: data.replace(b"\n", b" "),
}
USUAL = ("replace",) * 6 + ("insert",) * 4


def _damaged(data: bytes, steps: Sequence[tuple[str, float, bytes]]) -> bytes:
    for kind, at, piece in steps:
        data = DAMAGE[kind](data, at, piece)[:MOST_BYTES]
    return data


def damaged(*samples: str | bytes, pieces: Sequence[bytes] = PIECES) -> SearchStrategy[bytes]:
    """Texts with one to four places replaced, cut, repeated, or in another encoding."""
    wholes = [each.encode() if isinstance(each, str) else each for each in samples]
    step = st.tuples(
        st.sampled_from((*USUAL, *DAMAGE)), st.floats(0, 1), st.sampled_from(tuple(pieces))
    )
    spoiled = st.builds(_damaged, st.sampled_from(wholes), st.lists(step, min_size=1, max_size=4))
    anything = st.one_of(st.just(b""), st.binary(max_size=200), st.sampled_from(tuple(pieces)))
    return st.one_of(*[spoiled] * 12, anything)


def jsons(*samples: Any) -> SearchStrategy[bytes]:
    """JSON texts: of changed trees mostly, and damaged ones."""
    whole = trees(*samples).map(as_json)
    return st.one_of(whole, whole, whole, damaged(*map(json.dumps, samples)))


def tomls(*samples: str) -> SearchStrategy[bytes]:
    """TOML texts: of changed trees mostly, and damaged ones."""
    whole = trees(*map(tomllib.loads, samples)).map(as_toml)
    return st.one_of(whole, whole, whole, damaged(*samples))


def texts(strategy: SearchStrategy[bytes]) -> SearchStrategy[str]:
    """The texts that bytes spell, surrogates of what is no UTF-8 included."""
    return strategy.map(lambda data: data.decode("utf-8", "surrogateescape"))
