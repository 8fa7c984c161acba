"""The table of tested vLLM versions, and what happens to a server that is not in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.vllm import signatures

SOURCE = Path(signatures.__file__).parents[2]
VERSIONS = ["0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"]


def write_vllm(folder: Path, version: str, table: signatures.Table) -> Path:
    """Write a vLLM that has the recorded functions of a version and nothing in them."""
    package = folder / "vllm"
    sources: dict[str, dict[str, list[str]]] = {"__init__.py": {}}
    for function, rows in table.items():
        file, _, name = function.partition(":")
        owner, _, own = name.rpartition(".")
        (parameters,) = [row["parameters"] for row in rows if version in row["versions"]]
        if parameters is not None:
            line = f"def {own}({parameters}): pass"
            sources.setdefault(file, {}).setdefault(owner, []).append(line)
    for file, owners in sources.items():
        path = package / file
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = owners.pop("", [])
        for owner, functions in owners.items():
            lines += [f"class {owner}:", *(f"    {line}" for line in functions)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        for parent in path.relative_to(folder).parents:
            (folder / parent / "__init__.py").touch()
    text = f"__version__ = version = {version + '+cpu'!r}\n"
    (package / "_version.py").write_text(text, encoding="utf-8")
    return package


@pytest.mark.parametrize("version", VERSIONS)
def test_a_recorded_version_passes(tmp_path: Path, version: str) -> None:
    package = write_vllm(tmp_path, version, signatures.load())
    assert signatures.check(package, signatures.load()) == version


def test_the_table_holds_every_function_that_is_checked() -> None:
    table = signatures.load()
    assert signatures.tested(table) == VERSIONS
    assert list(table) == list(signatures.FUNCTIONS)
    for rows in table.values():  # each version once
        assert sorted(v for row in rows for v in row["versions"]) == VERSIONS


def test_recording_gives_the_table_back(tmp_path: Path) -> None:
    table = signatures.load()
    packages = [write_vllm(tmp_path / version, version, table) for version in VERSIONS]
    assert signatures.record(packages) == table


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("logits, spec_decode_metadata", "logits, metadata"),
        ("def _sample", "def _sample_all"),
        ("def _sample", "_sample = None\n    def other"),
    ],
)
def test_a_changed_function_is_named(tmp_path: Path, old: str, new: str) -> None:
    package = write_vllm(tmp_path, "0.32.0", signatures.load())
    file = package / "v1/worker/gpu_model_runner.py"
    changed = file.read_text(encoding="utf-8").replace(old, new)
    file.write_text(changed, encoding="utf-8")
    signatures._parsed.cache_clear()
    with pytest.raises(signatures.SignatureError, match=r"0\.32\.0 has another .*_sample"):
        signatures.check(package, signatures.load())


# What vLLM's loader does with plugins: it logs a failed import, and calls what it loaded.
LOADER = """
import importlib.metadata, logging
def load_general_plugins():
    functions = []
    for plugin in importlib.metadata.entry_points(group="vllm.general_plugins"):
        try:
            functions.append(plugin.load())
        except Exception:
            logging.exception("Failed to load plugin")
    for function in functions:
        function()
load_general_plugins()
"""


def start(
    folder: Path, active: str | None = "1", before: str = "", serve: str = "print('serving')"
) -> subprocess.CompletedProcess[str]:
    """Run vLLM's loader with our entry point and the vLLM in a folder."""
    info = folder / "outrider-0.1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Name: outrider\nVersion: 0.1.0\n", encoding="utf-8")
    points = "[vllm.general_plugins]\noutrider = outrider.vllm.plugin:register\n"
    (info / "entry_points.txt").write_text(points, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "OUTRIDER_VLLM"}
    if active is not None:
        environment["OUTRIDER_VLLM"] = active
    # -S: nothing that is installed, so neither torch nor another entry point.
    code = (
        f"import sys; sys.path[:0] = [{str(folder)!r}, {str(SOURCE)!r}]\n{before}\n{LOADER}{serve}"
    )
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=60,
    )


def refused(ended: subprocess.CompletedProcess[str]) -> str:
    """The one sentence of a process that ended before it served."""
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("error: ")
    assert ended.stderr.count("\n") == 1
    return ended.stderr


@pytest.mark.parametrize("active", [None, "", "0"])
def test_the_plugin_sleeps_until_it_is_asked(tmp_path: Path, active: str | None) -> None:
    ended = start(tmp_path, active)  # no vLLM there, and nobody minds
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "serving\n", "")


def test_it_starts_in_a_tested_vllm_without_importing_it(tmp_path: Path) -> None:
    write_vllm(tmp_path, "0.32.0", signatures.load())
    ended = start(tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "serving\n", "")


def test_an_unknown_version_stops_the_server(tmp_path: Path) -> None:
    package = write_vllm(tmp_path, "0.32.0", signatures.load())
    (package / "_version.py").write_text("__version__ = '0.99.1'\n", encoding="utf-8")
    assert "not tested with vLLM 0.99.1; install one of 0.28.0" in refused(start(tmp_path))


def test_a_changed_signature_stops_the_server(tmp_path: Path) -> None:
    package = write_vllm(tmp_path, "0.32.0", signatures.load())
    file = package / "v1/sample/rejection_sampler.py"
    file.write_text("class RejectionSampler: pass\n", encoding="utf-8")
    assert "0.32.0 has another v1/sample/rejection_sampler.py" in refused(start(tmp_path))


def test_no_vllm_and_no_such_value_stop_the_server(tmp_path: Path) -> None:
    assert "vLLM is not installed" in refused(start(tmp_path))
    assert "OUTRIDER_VLLM is 'yes'" in refused(start(tmp_path, "yes"))


BROKEN = """
import sys
from importlib.abc import MetaPathFinder
class Broken(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {name!r}:
            raise ImportError("no " + name)
sys.meta_path.insert(0, Broken())
"""


@pytest.mark.parametrize("name", ["outrider.vllm.hooks", "outrider.vllm.signatures"])
def test_a_failed_import_of_ours_is_not_swallowed(tmp_path: Path, name: str) -> None:
    write_vllm(tmp_path, "0.32.0", signatures.load())
    assert f"no {name}" in refused(start(tmp_path, before=BROKEN.format(name=name)))


def test_a_module_of_vllm_is_not_imported_without_its_change(tmp_path: Path) -> None:
    # torch is missing here, so our function cannot come in; the server must not go on without it.
    write_vllm(tmp_path, "0.32.0", signatures.load())
    serve = "import vllm.v1.worker.gpu_model_runner\nprint('serving')"
    ended = start(tmp_path, serve=serve)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "No module named 'torch'" in ended.stderr
