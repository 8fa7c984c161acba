"""What would come to nothing, or replace something else, is refused before the work."""

from __future__ import annotations

import shutil
from itertools import chain
from pathlib import Path

import pytest

from outrider.base.alone import alone
from outrider.training import adapt
from tests.support.commands import outrider


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"--rate": "nan"}, "rate is nan"),
        ({"--drafter": "out/begun"}, "out/begun lies in out, whose drafter is replaced"),
        ({"--out": "mine"}, "mine/drafter is none that was adapted here"),
        ({"--out": "linked"}, "linked/drafter is none that was adapted here"),
        ({"--out": "held"}, "another process writes to held; wait for its end"),
    ],
)
def test_what_is_refused(
    words: dict[str, str], said: str, tiny_llama: Path, tiny_drafter: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(adapt, "make_data", None)
    shutil.copytree(tiny_drafter, "out/begun")
    Path("mine/drafter").mkdir(parents=True)
    Path("mine/drafter/kept").write_text("")
    Path("linked/data").mkdir(parents=True)
    Path("linked/drafter").symlink_to(tmp_path / "nowhere")
    given = {"--target": tiny_llama, "--drafter": tiny_drafter, "--prompts": "p.jsonl"}
    words = {"--out": "out", **words}
    with alone(Path("held")):
        done = outrider("train", "adapt", *chain.from_iterable((given | words).items()))
    assert done.exit_code == 2
    assert said in done.stderr
    assert Path("mine/drafter/kept").exists()
