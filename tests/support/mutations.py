"""Seeded mutations of tiny checkpoints, and one attempt to load and run each.

Run as a program with a folder of checkpoints, a first seed and a count, it attempts them one by one
in its own process under a limit of memory, and prints a line before and after each.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outrider import LLM, SamplingParams
from outrider.errors import OutriderError
from tests.support.rewritten import Rewritten

SPARE = 1 << 30
"""Bytes of address space that an attempt may take beyond those of a process that has loaded one."""
POOL: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3, 7, -8, 255, 2**15, 2**24 + 1, 2**27, 2**31 - 1, 2**31,
    2**32 + 3, 2**53, 2**63, 2**64, 10**19, 10**30, 0.0, -0.0, 0.5, -1.5, 1e-320, 1e38, 1e308,
    float("inf"), float("-inf"), float("nan"), "", "x", "a" * 5000, "../x", "\0", "0", "auto",
    "float8_e4m3fn", [], [1], ["a"], [[1]], [[]], [0, 0], [10**9, 16], {}, {"a": 1}, {"": {}},
    [None], ["re:(.|\\w)+!"], "{{ 1 / 0 }}", "{% for %}", [1] * 3000,
]  # fmt: skip


def mutate(tree: Any, draw: random.Random) -> Any:
    """``tree`` with one place changed, deleted or given another's value."""
    at, holder, key = tree, None, None
    while isinstance(at, dict | list) and at and (holder is None or draw.random() < 0.8):
        holder, key = at, draw.choice(list(at) if isinstance(at, dict) else range(len(at)))
        at = at[key]
    if holder is None:
        return draw.choice(POOL)
    kind = draw.randrange(8)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[f"{key}{draw.choice(['', 's', '_'])}"] = draw.choice(POOL)
    elif kind == 2:
        holder[key] = holder[draw.choice(list(holder) if isinstance(holder, dict) else [0])]
    else:
        holder[key] = draw.choice(POOL)
    return tree


def change_json(file: Path, draw: random.Random) -> None:
    tree = json.loads(file.read_text())
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        tree = mutate(tree, draw)
    file.write_text(json.dumps(tree))


def change_header(file: Path, draw: random.Random) -> None:
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.dumps(mutate(json.loads(data[8 : 8 + length]), draw)).encode()
    count = draw.choice([len(header)] * 9 + [2**63])
    file.write_bytes(count.to_bytes(8, "little") + header + data[8 + length :])


def change_gguf(file: Path, draw: random.Random) -> None:
    """Other metadata, another number somewhere in the header, or a file cut short."""
    if draw.random() < 0.5:
        known = Rewritten(file)
        changed = mutate(known.metadata, draw)
        file.write_bytes(known.with_metadata(changed if isinstance(changed, dict) else {}))
        return
    data = bytearray(file.read_bytes())
    if draw.random() < 0.1:
        file.write_bytes(data[: draw.randrange(len(data))])
        return
    at = draw.randrange(4, min(len(data) - 8, 16000))
    size = draw.choice([1, 1, 4, 8])
    number = draw.choice([n for n in POOL if type(n) is int]) % (1 << (8 * size))
    data[at : at + size] = number.to_bytes(size, "little")
    file.write_bytes(data)


CHANGES: dict[str, Callable[[Path, random.Random], None]] = {
    "config.json": change_json,
    "generation_config.json": change_json,
    "tokenizer.json": change_json,
    "tokenizer_config.json": change_json,
    "model.safetensors": change_header,
    "model.gguf": change_gguf,
}
WEIGHTS = {"config.json": 5, "model.gguf": 5}


def mutated(bases: Path, seed: int, folder: Path) -> tuple[Path, str]:
    """One of the checkpoints in ``bases``, copied to ``folder`` and changed by ``seed``."""
    draw = random.Random(seed)
    base = draw.choice(sorted(bases.iterdir()))
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base, folder)
    files = [name for name in CHANGES if (folder / name).is_file()]
    name = draw.choices(files, [WEIGHTS.get(name, 2) for name in files])[0]
    CHANGES[name](folder / name, draw)
    gguf = folder / "model.gguf"
    return gguf if gguf.is_file() else folder, f"{seed} {base.name} {name}"


def attempt(model: Path) -> str:
    """Load ``model`` and decode with it: "ran", or the sentence in which it was refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            llm = LLM(model, drafter=None, memory="32MiB", max_num_seqs=2)
            params = SamplingParams(temperature=0, max_tokens=1)
            llm.generate([[1, 2, 3]], params)
            if llm.inputs.codec is not None:
                llm.generate(["hello, def greet(name)"], params)
                llm.chat([{"role": "user", "content": "hello"}], params)
        except OutriderError as error:
            said = str(error)
            assert said, "an error says nothing"
            assert "\n" not in said, said
            assert len(said) < 1500, said
            return said
    return "ran"


def run(bases: Path, first: int, count: int, scratch: Path) -> None:
    """Attempt ``count`` seeds and print what came of each."""
    for base in sorted(bases.iterdir()):
        attempt(base / "model.gguf" if (base / "model.gguf").is_file() else base)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + SPARE, held + SPARE))
    for seed in range(first, first + count):
        model, about = mutated(bases, seed, scratch)
        print("begin", about, flush=True)
        started = time.process_time()
        said = attempt(model)
        print("end", seed, round(time.process_time() - started, 2), said[:400], flush=True)


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
