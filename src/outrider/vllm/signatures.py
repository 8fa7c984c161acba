"""Checks vLLM's version and the functions that Outrider replaces, from vLLM's source.

Nothing is imported, so an extracted wheel can be checked like an installed package::

    python -m outrider.vllm.signatures FOLDER...

prints the table for wheels extracted to these folders; ``signatures.json`` is its output.
"""

import ast
import importlib.util
import json
import sys
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

# Everything that is replaced, and the functions that call it or that we call.
FUNCTIONS = (
    "engine/arg_utils.py:EngineArgs.create_engine_config",
    "v1/worker/worker_base.py:WorkerWrapperBase.init_device",
    "v1/worker/gpu_model_runner.py:GPUModelRunner._sample",
    "v1/sample/sampler.py:Sampler.sample",
    "v1/sample/ops/topk_topp_sampler.py:TopKTopPSampler.forward_native",
    "v1/sample/rejection_sampler.py:RejectionSampler.forward",
    "v1/sample/rejection_sampler.py:apply_sampling_constraints",
    "v1/sample/rejection_sampler.py:rejection_sample",
    "v1/spec_decode/custom_class_proposer.py:create_custom_proposer",
    "v1/worker/gpu/model_runner.py:GPUModelRunner.load_model",
    "v1/worker/gpu/sample/sampler.py:Sampler.sample",
    "v1/worker/gpu/sample/gumbel.py:gumbel_sample",
    "v1/worker/gpu/sample/states.py:SamplingStates.apply_top_k_top_p",
    "v1/sample/ops/topk_topp_sampler.py:apply_top_k_top_p",
    "v1/sample/ops/topk_topp_sampler.py:flashinfer_sampler_supported",
    "v1/sample/ops/topk_topp_sampler.py:xpu_sampler_supported",
    "v1/worker/gpu/spec_decode/rejection_sampler_utils.py:rejection_sample",
)
Table = dict[str, list[dict[str, Any]]]


class SignatureError(Exception):
    """A vLLM that the table does not know, in one sentence."""


def version_of(package: Path) -> str:
    """Return the version of the vLLM in a folder ``vllm``, without its local part.

    Raises:
        SignatureError: the folder does not say.
    """
    file = package / "_version.py"
    if file.is_file():
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
                if "__version__" in names:
                    return str(node.value.value).partition("+")[0]
    raise SignatureError(f"the vLLM in {package} does not tell its version; install a release.")


def signature_of(package: Path, function: str) -> str | None:
    """Return a function's parameters without annotations, None where it does not exist.

    Args:
        package: the folder ``vllm``.
        function: ``path/of/module.py:Class.function``.
    """
    file, _, name = function.partition(":")
    if not (package / file).is_file():
        return None
    body: Sequence[ast.stmt] = _parsed(package / file).body
    node: ast.stmt | None = None
    for part in name.split("."):
        found = [item for item in body if getattr(item, "name", None) == part]
        if not found:
            return None
        node = found[-1]
        body = getattr(node, "body", [])
    if not isinstance(node, ast.FunctionDef):
        return None
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    for argument in (*every, node.args.vararg, node.args.kwarg):
        if argument is not None:
            argument.annotation = None
    return ast.unparse(node.args)


@cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def load() -> Table:
    """Return the recorded table: by function, parameters and the versions that have them."""
    table: Table = json.loads((files(__package__) / "signatures.json").read_text("utf-8"))
    return table


def tested(table: Table) -> list[str]:
    """Return the versions in a table, the oldest first."""
    names = {version for rows in table.values() for row in rows for version in row["versions"]}
    return sorted(names, key=lambda name: [int(part) for part in name.split(".")])


def check(package: Path, table: Table) -> str:
    """Return the version of a vLLM whose functions are those of the table.

    Raises:
        SignatureError: its version is unknown, or a function differs from that version's.
    """
    version = version_of(package)
    known = tested(table)
    if version not in known:
        raise SignatureError(
            f"Outrider's rule is not tested with vLLM {version}; install one of "
            f"{', '.join(known)}, or unset OUTRIDER_VLLM."
        )
    for function, rows in table.items():
        found = signature_of(package, function)
        (expected,) = [row["parameters"] for row in rows if version in row["versions"]]
        if found != expected:
            raise SignatureError(
                f"vLLM {version} has another {function} than its release: "
                f"{_shown(found)} instead of {_shown(expected)}; install the release, "
                "or unset OUTRIDER_VLLM."
            )
    return version


def _shown(parameters: str | None) -> str:
    return "no such function" if parameters is None else f"({parameters})"


def check_installed() -> str:
    """Return the version of the installed vLLM after `check`; nothing is imported."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise SignatureError("vLLM is not installed; install it, or unset OUTRIDER_VLLM.")
    return check(Path(spec.submodule_search_locations[0]), load())


def record(packages: Sequence[Path]) -> Table:
    """Return the table of several vLLMs."""
    table: Table = {}
    for function in FUNCTIONS:
        rows: dict[str | None, list[str]] = {}
        for package in packages:
            rows.setdefault(signature_of(package, function), []).append(version_of(package))
        table[function] = [{"versions": v, "parameters": p} for p, v in rows.items()]
    return table


if __name__ == "__main__":
    made = record([Path(folder) / "vllm" for folder in sys.argv[1:]])
    lines = {name: ",\n    ".join(map(json.dumps, rows)) for name, rows in made.items()}
    parts = [f"{json.dumps(name)}: [\n    {rows}\n  ]" for name, rows in lines.items()]
    print("{\n  " + ",\n  ".join(parts) + "\n}")
