"""The tables of tested versions, and what happens to a server that is not in them."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import outrider
from outrider.plugins.common import signatures
from outrider.plugins.sglang.hooks import SURFACE as sglang
from outrider.plugins.vllm.hooks import SURFACE as vllm
from tests.support.record_wheels import Recorded, load, table_of, write

SOURCE = Path(outrider.__file__).parents[1]
VERSIONS = {
    "vllm": ["0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"],
    "sglang": ["0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23"],
}
SURFACES = {"vllm": vllm, "sglang": sglang}


@cache
def recorded(engine: str) -> Recorded:
    return load(engine)


def write_vllm(folder: Path, version: str = "0.32.0") -> Path:
    """Write the recorded functions of a version of vLLM, as its wheel has them."""
    return write(folder, "vllm", version, recorded("vllm")[version])


@pytest.mark.parametrize(
    ("engine", "version"), [(engine, each) for engine in VERSIONS for each in VERSIONS[engine]]
)
def test_the_wheels_of_tested_versions_pass(tmp_path: Path, engine: str, version: str) -> None:
    package = write(tmp_path, engine, version, recorded(engine)[version])
    surface = SURFACES[engine]
    assert signatures.check(surface, package, surface.load()) == version


@pytest.mark.parametrize("engine", VERSIONS)
def test_the_table_is_that_of_the_wheels(tmp_path: Path, engine: str) -> None:
    surface = SURFACES[engine]
    packages = [
        write(tmp_path / version, engine, version, recorded(engine)[version])
        for version in VERSIONS[engine]
    ]
    table = surface.load()
    assert signatures.tested(table) == VERSIONS[engine]
    assert table_of(surface, packages) == table
    for function, rows in table.items():  # a table of nothing would let everything pass
        assert any(row["parameters"] is not None for row in rows), function


RUNNER, SAMPLER = "gpu_model_runner.py", "gpu/sample/sampler.py"


@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        (RUNNER, "spec_decode_metadata: ", "spec: ", r"_sample .*: \(self, logits, spec\) instead"),
        (RUNNER, "def _sample(", "def _sample_all(", r"_sample .*: nothing instead of \(self"),
        (RUNNER, "def _sample(", "async def _sample(", r"_sample .*: nothing instead of \(self"),
        (SAMPLER, "= gumbel_sample(", "= self.own(", r"sample\(\) .*: nothing instead of called"),
    ],
)
def test_a_changed_function_is_named(
    tmp_path: Path, file: str, old: str, new: str, words: str
) -> None:
    package = write_vllm(tmp_path)
    path = package / "v1/worker" / file
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    surface = SURFACES["vllm"]
    with pytest.raises(signatures.SignatureError, match=words):
        signatures.check(surface, package, surface.load())


# What the loaders of vLLM and SGLang do with plugins: a failed import is logged, no more; SGLang
# does so with a plugin that raises, too.
LOADER = """
import importlib.metadata, logging
def load_plugins(group):
    functions = []
    for plugin in importlib.metadata.entry_points(group=group):
        try:
            functions.append(plugin.load())
        except Exception:
            logging.exception("Failed to load plugin")
    for function in functions:
        try:
            function()
        except Exception:
            logging.exception("Failed to execute plugin")
load_plugins({group!r})
"""
GROUPS = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}


def start(
    folder: Path,
    active: str | None = "1",
    before: str = "",
    serve: str = "print('serving')",
    engine: str = "vllm",
) -> subprocess.CompletedProcess[str]:
    """Run an engine's loader with our entry point and the engine in a folder."""
    info = folder / "outrider-0.1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Name: outrider\nVersion: 0.1.0\n", encoding="utf-8")
    points = f"[{GROUPS[engine]}]\noutrider = outrider.plugins.{engine}.plugin:register\n"
    (info / "entry_points.txt").write_text(points, encoding="utf-8")
    variable = f"OUTRIDER_{engine.upper()}"
    environment = {name: value for name, value in os.environ.items() if name != variable}
    if active is not None:
        environment[variable] = active
    # -S: nothing that is installed, so neither torch nor another entry point.
    loader = LOADER.format(group=GROUPS[engine])
    code = (
        f"import sys; sys.path[:0] = [{str(folder)!r}, {str(SOURCE)!r}]\n{before}\n{loader}{serve}"
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
    write_vllm(tmp_path)
    ended = start(tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "serving\n", "")


def test_an_unknown_version_stops_the_server(tmp_path: Path) -> None:
    package = write_vllm(tmp_path)
    (package / "_version.py").write_text("__version__ = '0.99.1'\n", encoding="utf-8")
    assert "not tested with vLLM 0.99.1; install one of 0.28.0" in refused(start(tmp_path))


def test_a_changed_signature_stops_the_server(tmp_path: Path) -> None:
    package = write_vllm(tmp_path)
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


@pytest.mark.parametrize(
    "name", ["outrider.plugins.vllm.hooks", "outrider.plugins.common.signatures"]
)
def test_a_failed_import_of_ours_is_not_swallowed(tmp_path: Path, name: str) -> None:
    write_vllm(tmp_path)
    assert f"no {name}" in refused(start(tmp_path, before=BROKEN.format(name=name)))


def test_a_module_of_vllm_is_not_imported_without_its_change(tmp_path: Path) -> None:
    # torch is missing here, so our function cannot come in; the server must not go on without it.
    write_vllm(tmp_path)
    serve = "import vllm.v1.worker.gpu_model_runner\nprint('serving')"
    ended = start(tmp_path, serve=serve)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "No module named 'torch'" in ended.stderr


def test_sglang_has_the_same_guards(tmp_path: Path) -> None:
    assert "SGLang is not installed" in refused(start(tmp_path, engine="sglang"))
    assert start(tmp_path, None, engine="sglang").stdout == "serving\n"
    package = write(tmp_path, "sglang", "0.5.23", recorded("sglang")["0.5.23"])
    ended = start(tmp_path, engine="sglang")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "serving\n", "")
    broken = BROKEN.format(name="outrider.plugins.sglang.hooks")
    assert "no outrider.plugins.sglang.hooks" in refused(
        start(tmp_path, before=broken, engine="sglang")
    )
    (package / "_version.py").write_text("__version__ = '0.5.99'\n", encoding="utf-8")
    said = refused(start(tmp_path, engine="sglang"))
    assert "not tested with SGLang 0.5.99; install one of 0.5.19" in said
