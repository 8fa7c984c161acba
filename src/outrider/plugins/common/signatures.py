"""Checks another engine's version and the functions that Outrider replaces, from its source.

Nothing is imported, so an extracted wheel can be checked like an installed package. The tables,
``plugins/vllm/signatures.json`` and SGLang's, have a key for each function that is replaced, that
calls one of those, or that we call: ``path/of/module.py:Class.function``, whose parameters are
checked, or ``path/of/module.py:function()``, which must be called by that name in the module.
``tests/support/record_wheels.py`` writes them.
"""

import ast
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

Table = dict[str, list[dict[str, Any]]]
CALLED = "called"


class SignatureError(Exception):
    """An engine that the table does not know, in one sentence."""


@dataclass(frozen=True)
class Surface:
    """An engine that a plugin of ours changes.

    ``engine`` is its name in sentences, ``package`` its package and the one of ours that goes into
    it, ``variable`` turns the plugin on.
    """

    engine: str
    package: str
    variable: str

    def load(self) -> Table:
        """Return the recorded table: by function, parameters and the versions that have them."""
        recorded = files(f"outrider.plugins.{self.package}") / "signatures.json"
        table: Table = json.loads(recorded.read_text("utf-8"))
        return table

    def check_installed(self) -> str:
        """Return the version of the installed engine after `check`; nothing is imported."""
        spec = importlib.util.find_spec(self.package)
        if spec is None or not spec.submodule_search_locations:
            raise SignatureError(
                f"{self.engine} is not installed; install it, or unset {self.variable}."
            )
        return check(self, Path(spec.submodule_search_locations[0]), self.load())


def version_of(package: Path) -> str:
    """Return the version of the engine in a package's folder, without its local part, or raise."""
    file = package / "_version.py"
    if file.is_file():
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
                if "__version__" in names:
                    return str(node.value.value).partition("+")[0]
    raise SignatureError(f"{package} does not tell its version; install a release.")


def signature_of(package: Path, function: str) -> str | None:
    """Return a function's parameters, or ``CALLED``; None where it is missing, or not called."""
    file, _, name = function.partition(":")
    if not (package / file).is_file():
        return None
    if name.endswith("()"):
        return CALLED if name.removesuffix("()") in _called(package / file) else None
    if (node := find_function(_parsed(package / file), name)) is None:
        return None
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    for argument in (*every, node.args.vararg, node.args.kwarg):
        if argument is not None:
            argument.annotation = None
    return ast.unparse(node.args)


def find_function(module: ast.Module, name: str) -> ast.FunctionDef | None:
    """Return the last definition of ``function`` or ``Class.function``, None without one."""
    body: Sequence[ast.stmt] = module.body
    node: ast.stmt | None = None
    for part in name.split("."):
        named = [item for item in body if getattr(item, "name", None) == part]
        if not named:
            return None
        node = named[-1]
        body = getattr(node, "body", [])
    return node if isinstance(node, ast.FunctionDef) else None


@cache
def _called(file: Path) -> frozenset[str]:
    calls = (node.func for node in ast.walk(_parsed(file)) if isinstance(node, ast.Call))
    return frozenset(each.id for each in calls if isinstance(each, ast.Name))


@cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def tested(table: Table) -> list[str]:
    """Return the versions in a table, the oldest first."""
    names = {version for rows in table.values() for row in rows for version in row["versions"]}
    return sorted(names, key=lambda name: [int(part) for part in name.split(".")])


def check(surface: Surface, package: Path, table: Table) -> str:
    """Return the version of an engine whose functions are the table's, or raise SignatureError."""
    version = version_of(package)
    known = tested(table)
    if version not in known:
        raise SignatureError(
            f"Outrider's rule is not tested with {surface.engine} {version}; install one of "
            f"{', '.join(known)}, or unset {surface.variable}."
        )
    for function, rows in table.items():
        parameters = signature_of(package, function)
        (expected,) = [row["parameters"] for row in rows if version in row["versions"]]
        if parameters != expected:
            raise SignatureError(
                f"{surface.engine} {version} has another {function} than its release: "
                f"{_shown(parameters)} instead of {_shown(expected)}; install the release, "
                f"or unset {surface.variable}."
            )
    return version


def _shown(parameters: str | None) -> str:
    if parameters is None:
        return "nothing"
    return parameters if parameters == CALLED else f"({parameters})"
