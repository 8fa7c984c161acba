"""A drafter in a package of its own: installed, recognised, budgeted, chosen, released."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider import LLM, SamplingParams
from outrider.drafters.registry import find_drafter, known_specs
from outrider.errors import ConfigError
from outrider.types import Speculation

DOCS = Path(__file__).parents[2] / "docs" / "drafters.md"
PROMPTS = ["ab ab ab ab", "the lazy dog"]
PARAMS = SamplingParams(temperature=0.8, max_tokens=24, seed=3, ignore_eos=True)


def install(folder: Path, module: str, source: str, points: str) -> None:
    """Install a package of one module, from a wheel."""
    wheel = folder / f"{module}-1.0-py3-none-any.whl"
    info = f"{module}-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as files:
        files.writestr(f"{module}.py", source)
        files.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        files.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: tests\nTag: py3-none-any\n")
        files.writestr(f"{info}/entry_points.txt", points)
        files.writestr(f"{info}/RECORD", "")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*command, "--target", str(folder / "site"), str(wheel)], check=True)


@pytest.fixture
def repeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package of docs/drafters.md."""
    code, points = re.findall(r"```(?:python|toml)\n(.*?)```", DOCS.read_text(), re.S)
    table = points.replace('[project.entry-points."outrider.drafters"]', "[outrider.drafters]")
    install(tmp_path, "outrider_repeat", code, table.replace('"', ""))
    assert len([line for line in code.splitlines() if line.strip()]) <= 30
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    known_specs.cache_clear()
    yield
    known_specs.cache_clear()


@pytest.mark.usefixtures("repeat")
def test_the_documented_drafter_drafts(tiny_llama: Path) -> None:
    expected = [o.outputs[0].token_ids for o in LLM(tiny_llama, None).generate(PROMPTS, PARAMS)]
    llm = LLM(tiny_llama, drafter="repeat")
    assert llm.drafter.name == "repeat"
    assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMS)] == expected
    assert llm.engine.counts.drafted > 0
    drafted = {
        name: {
            event.drafted.drafter
            for _, event in llm.stream(PROMPTS, PARAMS, speculation=Speculation(drafter=name))
            if event.drafted is not None
        }
        for name in ("none", "repeat")
    }
    assert drafted == {"none": set(), "repeat": {"repeat"}}
    with pytest.raises(ConfigError, match=r"neither a drafter \(auto, .*repeat\) nor a folder"):
        LLM(tiny_llama, drafter="repeated")


def test_a_package_that_cannot_be_loaded_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "broken_drafter", "x = 1\n", "[outrider.drafters]\nbad = broken_drafter:no\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    known_specs.cache_clear()
    with pytest.raises(ConfigError, match=r"drafter 'bad' of broken_drafter:no cannot be loaded"):
        find_drafter("bad", tmp_path)
    known_specs.cache_clear()
