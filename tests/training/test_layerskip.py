"""Sublayers that a target can do without, found on what it has said, kept, and drafted by."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from outrider.base.types import SamplingParams
from outrider.drafters.layerskip import LayerskipSpec, save_skips
from outrider.drafters.registry import find_drafter
from outrider.errors import ConfigError, ModelError, TrainingError
from outrider.native import choice as native
from outrider.training import layerskip
from outrider.training.layerskip import search_skips
from outrider.training.samples import About, DataFolder, Sample
from tests.support.exactness import VOCABULARY, alone, make_engine, requests, run
from tests.support.skipping import LAYERS, planted_target, useless

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native step is off")
SEED = 5


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted_target(tmp_path_factory.mktemp("layerskip") / "target", SEED)


@pytest.fixture(scope="module")
def data(target: Path, tmp_path_factory: pytest.TempPathFactory) -> DataFolder:
    draw = np.random.default_rng(0)
    about = About(str(target), VOCABULARY, "", 60, (0.0, 0.8), 40, 64, 0)
    samples = [
        Sample(draw.integers(0, VOCABULARY, 50).astype(np.int32), np.arange(50) >= 10, number)
        for number in range(60)
    ]
    folder = DataFolder(tmp_path_factory.mktemp("data"), about, ())
    folder.add(samples, 0, 60)
    return folder


def test_what_matters_little_is_found_and_drafts(
    target: Path, data: DataFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layerskip, "row_cost", lambda model: 0.05)
    told: list[int] = []
    file = tmp_path / "skips.json"
    found = search_skips(target, data, file, None, lambda done, most: told.append(done))
    skipped = frozenset(range(2 * LAYERS)) - {*found.sublayers}
    assert len(skipped & useless(SEED)) >= 7
    assert len(skipped - useless(SEED)) <= 1
    assert found.agreement > 0.8
    assert found.speed > 1.1
    assert told == [*range(1, found.evaluations + 1)]
    again = tmp_path / "again.json"
    assert search_skips(target, data, again, None, lambda *_: None) == found
    assert json.loads(again.read_text()) == json.loads(file.read_text())
    for option in (str(file), file, f"layerskip:{file}"):
        spec = find_drafter(option, target)
        assert spec == LayerskipSpec(kept=found.sublayers, layers=LAYERS)
    assert find_drafter(f"auto+layerskip:{file}", target).members[-1] == spec
    for heat in (0.0, 1.0):
        queued = requests([[3, 4], [7, 5, 9]], SamplingParams(temperature=heat, max_tokens=30))
        engine = make_engine(target, spec)
        assert run(engine, queued) == alone(target, queued)
    assert engine.counts.acceptance_length > 2


def test_no_gain_is_an_answer(
    target: Path, data: DataFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layerskip, "row_cost", lambda model: 1.0)
    with pytest.raises(TrainingError, match="can be left out at a gain"):
        search_skips(target, data, tmp_path / "skips.json", None, lambda *_: None)
    assert not (tmp_path / "skips.json").exists()


def test_files_that_do_not_fit_are_refused(target: Path, data: DataFolder, tmp_path: Path) -> None:
    file = tmp_path / "skips.json"
    save_skips(file, LAYERS + 1, (0, 1, 2), {})
    with pytest.raises(ConfigError, match="of 13 layers, and this one has 12"):
        make_engine(target, find_drafter(file, target))
    for wrong in ([], [1, 0], [0, 24], [-1], ["a"]):
        file.write_text(json.dumps({"drafter": "layerskip", "layers": 12, "sublayers": wrong}))
        with pytest.raises(ModelError, match="sublayers"):
            find_drafter(file, target)
    with pytest.raises(ModelError, match="cannot be read"):
        find_drafter("layerskip:missing.json", target)
    (tmp_path / "other.json").write_text("{}")
    for name, why in (("skips", r"no name of a \.json file"), ("other.json", "something else")):
        with pytest.raises(ConfigError, match=why):
            save_skips(tmp_path / name, LAYERS, (0,), {})
        with pytest.raises(ConfigError, match=why):  # before the search
            search_skips(target, data, tmp_path / name, 0, lambda *_: None)
