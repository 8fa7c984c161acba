"""``outrider tune`` on the command line: its table, its file, and who reads that."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from outrider import pocket
from outrider.cli.common import shapes
from outrider.errors import ConfigError
from tests.support.commands import outrider

PROMPTS = ["def greet(name):", "for word in ("]


@pytest.fixture(scope="module")
def pair(tiny_llama: Path, tiny_drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shutil.copytree(tiny_llama, tmp_path_factory.mktemp("tune") / "pair")
    shutil.copytree(tiny_drafter, folder / "drafter")
    return folder


@pytest.fixture(autouse=True)
def _prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pocket, "prompts", lambda: PROMPTS)


SMALL = (
    "--num-speculative-tokens", "1,2", "--max-tokens", 6, "--rounds", 3, "--dtype", "float32",
)  # fmt: skip


def test_the_file_is_for_serve_and_for_deploy(pair: Path, tmp_path: Path) -> None:
    config, report, plot = (tmp_path / name for name in ("t.toml", "t.json", "t.png"))
    done = outrider(
        "tune", "--model", pair, *SMALL, "--batch-size", "1,2", "--trees", "4:2",
        "--out", config, "--out", report, "--plot", plot,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    for text in ("batch size 1: ", "batch size 2: ", "verdict", "none beaten in both", "% of its"):
        assert text in done.stdout
    assert config.read_text(encoding="utf-8") in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")
    found = json.loads(report.read_text(encoding="utf-8"))
    settings = found["batch_sizes"][0]["settings"]
    assert {"drafter": "model", "max_draft_nodes": 4}.items() <= next(
        row for row in settings if row["max_draft_nodes"]
    ).items()
    assert found["pareto"]

    shown = outrider("config", "--config", config, "--json")
    assert shown.exit_code == 0, shown.output
    served = {n: each["value"] for n, each in json.loads(shown.stdout).items()}
    assert found["serve"].items() <= served.items()
    assert served["model"] == str(pair)

    for engine in ("vllm", "outrider"):
        rendered = outrider("ops", "deploy", "render", config, "--engine", engine)
        assert rendered.exit_code == 0, rendered.output
        assert f"serve {pair}" in rendered.stdout


def test_json_goes_to_stdout_alone(pair: Path) -> None:
    done = outrider("tune", "--model", pair, *SMALL, "--batch-size", "1", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["batch_sizes"][0]["batch_size"] == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--batch-size", "a"), "--batch-size is 'a'"),
        (("--batch-size", "0"), "batch_sizes is 0"),
        (("--num-speculative-tokens", "0"), "lengths is 0"),
        (("--trees", "4:4"), "--trees has '4:4'"),
        (("--drafter", "ngram"), "give auto, or auto+"),
        (("--prompts", "nothing"), "workload 'nothing' is not known"),
        (("--num-prompts", "3"), "num_prompts is 3"),
        (("--max-tpot", "0"), "max_tpot is 0"),
        (("--rounds", "2"), "greater than or equal to 3"),
        (("--out", "/nowhere/t.toml"), "cannot be written"),
        (("--plot", "t.svg"), "ends in .png"),
        (("--model", "/nowhere"), "/nowhere"),
    ],
)
def test_bad_input_ends_with_a_sentence(
    pair: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    done = outrider("tune", "--model", pair, *SMALL, *arguments)
    assert done.exit_code == (1 if "--model" in arguments else 2), done.output
    assert sentence in " ".join(done.output.split())
    assert "Traceback" not in done.output


def test_trees_are_read_from_text() -> None:
    assert shapes("6:3,8:4") == [(6, 3), (8, 4)]
    for wrong in ("6", "4:4", "x:2", "6:0", ""):
        with pytest.raises(ConfigError, match="more nodes than depth"):
            shapes(wrong)


def test_serve_refuses_what_is_no_table_of_deploy(tmp_path: Path) -> None:
    config = tmp_path / "serve.toml"
    config.write_text("deploy = 3\n", encoding="utf-8")
    done = outrider("config", "--config", config)
    assert done.exit_code == 2
    assert "deploy" in done.output
