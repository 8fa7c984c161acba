"""The order of the house, read from the imports: lower floors know nothing of the floors above."""

import ast
import graphlib
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import REPOSITORY

# Lowest first. What stands on one floor may import each other, but not in a circle.
# "outrider" is the package's own __init__, the door for Python users.
FLOORS = [
    {"base"},
    {"sampling", "cache", "text"},
    {"checkpoints"},
    {"native"},
    {"models"},
    {"drafters"},
    {"engine.control"},
    {"engine"},
    {"frontend"},
    {"llm", "async_llm"},
    {"outrider"},
    {"ops.metrics"},
    {"server", "bench", "audit", "training"},
    {"ops"},
    {"pocket", "plugins"},
    {"cli"},
    {"__main__"},  # python -m outrider
]
FOUNDATIONS = {"errors", "params"}
"""Modules at the root that count as base."""
FLOOR = {part: number for number, parts in enumerate(FLOORS) for part in parts}
TOP_OF_ENGINE = FLOOR["outrider"]
ENGINE_NEEDS = {
    "torch",
    "numpy",
    "ml_dtypes",
    "safetensors",
    "tokenizers",
    "transformers",
    "huggingface_hub",
    "jinja2",
    "llguidance",
    "gguf",
    "tqdm",
}
NEEDS: dict[str, set[str]] = {
    "base": {"numpy", "yaml", "httpx", "httpcore", "httptools", "pydantic"},
    "outrider.base.types": set(),
    "outrider.base.plots": {"matplotlib"},
    "outrider.native._interface": {"_cffi_backend"},
    "outrider.native.generate": {"cffi"},
}
"""Of parts and modules that have less than the engine, or something else."""
WITHOUT_TORCH = {
    "outrider.base.types",
    "outrider.cache.pages",
    "outrider.checkpoints.configs",
    "outrider.checkpoints.folder_tokenizer",
    "outrider.checkpoints.rope",
    "outrider.engine.scheduler",
    "outrider.engine.control.chooser",
    "outrider.engine.control.kept_costs",
    "outrider.engine.control.learner",
    "outrider.engine.control.summary",
    "outrider.engine.control.switch",
}
TYPES_NEED = {"outrider.errors", "outrider.params", "outrider.base.limits", "outrider.base.trees"}
MANY_LINES, MAX_LINES = 450, 700
"""Lines of a file from which on a warning asks whether it does one job, and the most of them."""
SOURCES = {".py", ".c", ".h", ".cpp", ".hpp", ".cu", ".cuh"}


@dataclass(frozen=True)
class Import:
    """One imported name: `outrider.cache.pages` for `from ..cache import pages`."""

    name: str
    line: int
    typing_only: bool


class ImportReader(ast.NodeVisitor):
    """Collects every import of a module, also inside functions and `if TYPE_CHECKING:`."""

    def __init__(self, package: str) -> None:
        self.package = package
        self.imports: list[Import] = []
        self.typing_only = False

    def add(self, name: str, node: ast.stmt) -> None:
        self.imports.append(Import(name, node.lineno, self.typing_only))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.add(alias.name, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            parents = self.package.split(".")
            above = parents[: len(parents) - node.level + 1]
            base = ".".join([*above, base] if base else above)
        for alias in node.names:
            self.add(f"{base}.{alias.name}", node)

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else None
        called = node.func.id if isinstance(node.func, ast.Name) else called
        first = node.args[0] if node.args else None
        if (
            called in {"import_module", "__import__"}
            and isinstance(first, ast.Constant)
            and isinstance(first.value, str)
        ):
            name = first.value
            self.add(self.package + name if name.startswith(".") else name, node)
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in ast.unparse(node.test):
            self.generic_visit(node)
            return
        before, self.typing_only = self.typing_only, True
        for child in node.body:
            self.visit(child)
        self.typing_only = before
        for child in node.orelse:
            self.visit(child)


def part_of(name: str) -> str:
    """`outrider.cache.pages` -> `cache`, `outrider.engine.control.costs` -> `engine.control`.

    What the door defines is the door's: `outrider` and `outrider.LLM` -> `outrider`.
    """
    _, second, third, *_ = (*name.split("."), "", "")
    if f"{second}.{third}" in FLOOR:
        return f"{second}.{third}"
    if second in FOUNDATIONS:
        return "base"
    # What the door itself defines is told from modules by its capitals, or is __version__.
    return second if second.islower() and second != "__version__" else "outrider"


def read_imports(package: Path) -> dict[str, list[Import]]:
    """Every module below `package` by its dotted name, with its imports."""
    modules = {}
    for file in sorted(package.rglob("*.py")):
        dotted = ".".join(file.relative_to(package.parent).with_suffix("").parts)
        name = dotted.removesuffix(".__init__")
        reader = ImportReader(name if name != dotted else name.rpartition(".")[0])
        reader.visit(ast.parse(file.read_text(encoding="utf-8"), str(file)))
        modules[name] = reader.imports
    return modules


def way_to_torch(start: str, modules: dict[str, list[Import]]) -> list[str]:
    """The shortest chain of run-time imports from `start` to torch, or nothing."""
    queue, seen = [[start]], {start}
    while queue:
        chain = queue.pop(0)
        for found in modules.get(chain[-1], []):
            if found.name.partition(".")[0] == "torch":
                # Types from torch are refused in the module itself, and forgiven further down.
                if len(chain) == 1 or not found.typing_only:
                    return [*chain, "torch"]
                continue
            target = found.name if found.name in modules else found.name.rpartition(".")[0]
            if not found.typing_only and target in modules and target not in seen:
                seen.add(target)
                queue.append([*chain, target])
    return []


def targets(name: str, modules: dict[str, list[Import]]) -> Iterator[str]:
    """The modules that a module imports, also for types alone."""
    for found in modules[name]:
        target = home(found.name, modules)
        if target and target != name:
            yield target


def home(name: str, modules: dict[str, list[Import]]) -> str:
    """The module that an imported name is, or is from; nothing where it is not ours."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def circle_of(graph: dict[str, set[str]]) -> str:
    """A circle of a graph, or nothing."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return " <- ".join(error.args[1])
    return ""


def check_imports(package: Path) -> list[str]:
    """What is wrong with the imports below `package`, one sentence each."""
    modules = read_imports(package)
    problems = []
    level: dict[str, set[str]] = {}
    for module, imports in modules.items():
        part = part_of(module)
        if part not in FLOOR:
            problems.append(f"{module}: {part} has no floor yet: give it one in FLOORS")
            continue
        for found in imports:
            where = f"{module}:{found.line}"
            top = found.name.partition(".")[0]
            if top != "outrider":
                allowed = NEEDS.get(module, NEEDS.get(part, ENGINE_NEEDS))
                known = top in sys.stdlib_module_names or top in allowed
                if FLOOR[part] <= TOP_OF_ENGINE and not known:
                    name = module if module in NEEDS else part
                    problems.append(f"{where}: {name} must do without {top}")
                continue
            target = part_of(found.name)
            if module == "outrider.base.types" and home(found.name, modules) not in TYPES_NEED:
                problems.append(f"{where}: types may know {', '.join(sorted(TYPES_NEED))} only")
            if target == part:
                continue
            if target not in FLOOR:
                problems.append(f"{where}: {target} has no floor yet: give it one in FLOORS")
            elif FLOOR[target] > FLOOR[part]:
                problems.append(f"{where}: {part} must not know {target}, a floor above")
            elif FLOOR[target] == FLOOR[part]:
                level.setdefault(part, set()).add(target)
    if circle := circle_of(level):
        problems.append(f"a circle on one floor: {circle}")
    if circle := circle_of({name: set(targets(name, modules)) for name in modules}):
        problems.append(f"a circle of modules: {circle}")
    light = {module for module in modules if part_of(module) in ("ops", "ops.metrics")}
    for module in sorted(WITHOUT_TORCH | light):
        if chain := way_to_torch(module, modules):
            problems.append(f"{module} must do without torch: {' -> '.join(chain)}")
    return problems


def check_lengths(*folders: Path) -> list[str]:
    """The source files that are too long, one sentence each."""
    problems = []
    for file in sorted(file for folder in folders for file in folder.rglob("*")):
        if file.suffix in SOURCES:
            lines = len(file.read_text(encoding="utf-8").splitlines())
            if lines > MANY_LINES:
                warnings.warn(f"{file.name} has {lines} lines: has it one job?", stacklevel=1)
            if lines > MAX_LINES:
                problems.append(f"{file.name} has {lines} lines, {MAX_LINES} are allowed")
    return problems


def test_the_house_is_in_order() -> None:
    assert check_imports(REPOSITORY / "src" / "outrider") == []


@pytest.mark.filterwarnings("default:.*has it one job")
def test_no_source_file_is_too_long() -> None:
    assert check_lengths(REPOSITORY / "src") == []


def build(root: Path, files: dict[str, str]) -> Path:
    """Write a made-up package with these files, and return its folder."""
    package = root / "outrider"
    for path, source in files.items():
        file = package / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source, encoding="utf-8")
    return package


def test_a_good_house_passes(tmp_path: Path) -> None:
    files = {
        "__init__.py": "from .llm import LLM\nfrom outrider.base.types import Request\n",
        "base/types.py": "import dataclasses\nfrom outrider.errors import OutriderError\n",
        "base/config.py": "from .types import Request\nfrom .. import errors\n",
        "errors.py": "",
        "llm.py": "import torch, outrider.engine.engine\n",
        "engine/engine.py": "from .scheduler import S\nfrom ..cache import pages, store\n",
        "engine/scheduler.py": (
            "from typing import TYPE_CHECKING\nfrom ..cache.pages import Pages\n"
            "if TYPE_CHECKING:\n    from .messages import Event\n"
        ),
        "engine/messages.py": "",
        "cache/pages.py": "from __future__ import annotations\n",
        "cache/store.py": "import torch.nn as nn\n",
        "server/app.py": "import fastapi\nfrom outrider import LLM, __version__\n",
        "cli/__init__.py": "from .main import app\nfrom outrider.pocket import build\n",
        "cli/main.py": "import typer\n",
        "__main__.py": "from outrider.cli import main\n",
        "pocket/build.py": "",
    }
    assert check_imports(build(tmp_path, files)) == []


@pytest.mark.parametrize(
    ("path", "source", "problem"),
    [
        ("sampling/law.py", "from outrider.engine import Engine", "not know engine"),
        ("sampling/law.py", "from ..engine.engine import Engine", "not know engine"),
        ("sampling/__init__.py", "from ..engine import Engine", "not know engine"),
        ("sampling/law.py", "from .. import llm", "not know llm"),
        ("sampling/law.py", "from outrider import LLM", "not know outrider"),
        ("sampling/law.py", "def f():\n    import outrider.models.weights", "not know models"),
        ("models/x.py", "import importlib\nimportlib.import_module('outrider.llm')", "know llm"),
        (
            "cache/prefix.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..drafters import D",
            "cache must not know drafters",
        ),
        ("__init__.py", "from .cli import main", "not know cli"),
        ("bench/offline.py", "from .. import __main__", "not know __main__"),
        ("ops/guard/loop.py", "from outrider.cli import main", "not know cli"),
        ("engine/worker.py", "import fastapi", "engine must do without fastapi"),
        ("base/types.py", "import numpy", "outrider.base.types must do without numpy"),
        ("base/x.py", "import transformers", "base must do without transformers"),
        ("base/types.py", "from .config import Config", "types may know outrider.base.limits"),
        ("ops/planning/x.py", "import torch", "outrider.ops.planning.x must do without torch"),
        ("ops/metrics/x.py", "from ..guard import loop", "ops.metrics must not know ops"),
        ("engine/control/x.py", "from ..engine import E", "engine.control must not know engine"),
        ("base/types.py", "import torch", "outrider.base.types must do without torch"),
        ("engine/scheduler.py", "from torch import Tensor", "engine.scheduler must do without"),
        ("engine/scheduler.py", "from ..cache import store", "cache.store -> torch"),
        ("cache/pages.py", "import torch.nn", "outrider.cache.pages must do without torch"),
        ("helpers/x.py", "", "helpers has no floor yet"),
        ("cli/x.py", "from ..helpers import x", "helpers has no floor yet"),
        ("bench/x.py", "from ..audit import y", "a circle on one floor"),
        ("cache/store.py", "from . import pages", "a circle of modules: outrider.cache."),
        (
            "cache/store.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .pages import Page",
            "a circle of modules: outrider.cache.",
        ),
    ],
)
def test_disorder_is_found(tmp_path: Path, path: str, source: str, problem: str) -> None:
    files = {
        "cache/store.py": "import torch",
        "cache/pages.py": "def f():\n    from . import store",
        "audit/y.py": "from outrider.bench import x",
    }
    problems = check_imports(build(tmp_path, {**files, path: source}))
    assert any(problem in found for found in problems), problems


def test_a_long_file_is_found(tmp_path: Path) -> None:
    build(tmp_path, {"fits.py": "\n" * MANY_LINES, "native/long.cpp": "\n" * (MAX_LINES + 1)})
    with pytest.warns(UserWarning, match=r"long\.cpp has 701 lines: has it one job"):
        assert check_lengths(tmp_path) == ["long.cpp has 701 lines, 700 are allowed"]
