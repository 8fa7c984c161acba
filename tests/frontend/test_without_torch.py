"""Without torch and transformers: what runs, and how what cannot is refused.

Each test runs in a process of its own, in which neither can be imported.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny import MakeCheckpoint, build_checkpoint

BLOCKED = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
from pathlib import Path
"""


def run(code: str, *args: object, fails: bool = False) -> str:
    """Return what a program printed; its last line on stderr if it ``fails``."""
    command = [sys.executable, "-c", BLOCKED + code, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert bool(done.returncode) == fails, done.stderr
    return done.stderr.strip().splitlines()[-1] if fails else done.stdout


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("llama"), "llama", tokenizer=True)


def command(*words: object, fails: bool = False) -> str:
    code = "sys.argv[0] = 'outrider'\nfrom outrider.cli import main\nmain()"
    return run(code, *words, fails=fails)


@pytest.mark.parametrize(
    "words",
    ["--help", "generate --help", "serve --help", "bench --help", "ops --help", "config"],
)
def test_help_and_options_are_shown(words: str) -> None:
    assert "--" in command(*words.split()) or words == "config"


def test_a_config_its_ropes_and_the_tokenizer_are_read(model: Path) -> None:
    said = run(
        "import json\n"
        "from outrider.checkpoints.configs import plain_config\n"
        "from outrider.checkpoints.folder_tokenizer import folder_tokenizer\n"
        "from outrider.checkpoints.rope import Rope\n"
        "folder = Path(sys.argv[1])\n"
        "config = plain_config(json.loads((folder / 'config.json').read_text()), 'config.json')\n"
        "words = folder_tokenizer(folder)\n"
        "print(config.hidden_size, Rope(config, 8).table().shape, words.backend.encode('ab').ids)",
        model,
    )
    from outrider.checkpoints.checkpoint import open_checkpoint
    from outrider.checkpoints.tokenizers import read_codec

    architecture = open_checkpoint(model).architecture
    assert architecture is not None
    sizes = architecture.hidden_size, (8, 2, architecture.head_dim)
    assert said == f"{sizes[0]} {sizes[1]} {read_codec(model).encode('ab')}\n"


@pytest.mark.parametrize(
    "modules",
    [
        "outrider, outrider.cli, outrider.ops, outrider.params",
        "outrider.server.run, outrider.frontend.inputs, outrider.frontend.outputs",
        "outrider.ops.deploy, outrider.ops.guard, outrider.ops.planning, outrider.ops.diagnose",
        "outrider.text.codec, outrider.text.template, outrider.text.conversation",
        "outrider.bench.quality, outrider.pocket.corpus",
    ],
)
def test_front_and_tools_do_without(modules: str) -> None:
    run(f"import {modules}")


def test_what_needs_the_extra_names_it() -> None:
    code = (
        "from outrider.base.extras import need_torch, torch_for\n"
        "from outrider.errors import ConfigError\n"
        "for use in (lambda: need_torch('this'), lambda: exec('import transformers.models')):\n"
        "    try:\n"
        "        with torch_for('this'):\n"
        "            use()\n"
        "    except ConfigError as error:\n"
        "        print(error)\n"
        "try:\n"
        "    with torch_for('that', extra='train'):\n"
        "        import transformers.models\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
    )
    assert run(code).splitlines() == [
        "this needs torch, which is not installed: pip install 'outrider[torch]'.",
        "this needs transformers, which is not installed: pip install 'outrider[torch]'.",
        "that needs transformers, which is not installed: pip install 'outrider[train]'.",
    ]


def test_other_missing_packages_are_not_the_extra(model: Path) -> None:
    code = (
        "from outrider.base.extras import torch_for\nwith torch_for('x'):\n    import nothing_here"
    )
    assert run(code, fails=True) == "ModuleNotFoundError: No module named 'nothing_here'"


def test_the_pocket_pair_is_built_with_the_extra_only() -> None:
    code = "import runpy\nrunpy.run_module('outrider.pocket.build', run_name='__main__')"
    said = run(code, fails=True)
    assert said.startswith("python -m outrider.pocket.build needs torch, which is not installed")


def test_models_that_are_not_native_name_the_extra(tmp_path: Path, model: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    said = command("generate", "--model", tmp_path, "--prompt", "x", fails=True)
    assert "a 'mamba' model, as configured, needs transformers, which is not installed" in said


def test_a_native_step_that_is_not_there_is_named(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_NATIVE_ISA", "off")
    said = command("generate", model, "--prompt", "x", fails=True)
    assert "the native step is off or not built (it takes a C++ compiler)" in said
    assert "needs torch, which is not installed" in said


def test_the_pocket_pair_decodes() -> None:
    code = (
        "from outrider import LLM, SamplingParams\n"
        "if __name__ == '__main__':\n"
        "    params = SamplingParams(temperature=0, max_tokens=8)\n"
        "    print(LLM('pocket').generate('def', params)[0].outputs[0].token_ids)\n"
    )
    from outrider import LLM, SamplingParams

    (output,) = LLM("pocket").generate("def", SamplingParams(temperature=0, max_tokens=8))
    assert run(code) == f"{output.outputs[0].token_ids}\n"


def test_a_gguf_file_decodes(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    from gguf import GGMLQuantizationType as Kind

    from tests.support.ggufs import SIZES, byte_level, convert

    source = make_checkpoint(tmp_path / "source", "llama", tokenizer=True, **SIZES)
    path, _ = convert(source, tmp_path / "a.gguf", Kind.Q8_0, byte_level())
    code = (
        "from outrider import LLM, SamplingParams\n"
        "params = SamplingParams(temperature=0, max_tokens=4)\n"
        "print(len(LLM(sys.argv[1]).generate('ab', params)[0].outputs[0].token_ids))"
    )
    assert run(code, path) == "4\n"


def test_a_server_answers(tmp_path: Path) -> None:
    """The engine's process is a new one: the blocker is in a sitecustomize that both import."""
    import json
    import os
    import time
    import urllib.request

    (tmp_path / "sitecustomize.py").write_text(BLOCKED)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    words = [sys.executable, "-m", "outrider", "serve", "--port", "0"]
    with subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True) as server:
        try:
            address = None
            assert server.stderr is not None
            for line in server.stderr:
                if "http://" in line:
                    address = "http://" + line.split("http://")[1].split()[0].rstrip("/.,")
                    break
            assert address is not None
            body = json.dumps({"prompt": "def", "max_tokens": 4}).encode()
            asked = urllib.request.Request(
                f"{address}/v1/completions", body, {"Content-Type": "application/json"}
            )
            for _ in range(600):
                try:
                    with urllib.request.urlopen(asked, timeout=60) as answer:
                        assert json.load(answer)["usage"]["completion_tokens"] == 4
                    break
                except OSError:
                    time.sleep(0.1)
            else:
                pytest.fail("no answer")
        finally:
            server.terminate()


def test_benchmarks_do_without_but_for_what_torch_computes() -> None:
    code = (
        "from benchmarks.__main__ import BENCHMARKS, application\n"
        "for name in BENCHMARKS:\n"
        "    try:\n"
        "        application(name)\n"
        "    except ModuleNotFoundError as error:\n"
        "        print(name, error.name)\n"
    )
    assert run(code) == "beside torch\nshift torch\nlosses torch\nparity torch\n"


def test_an_audit_names_the_extra() -> None:
    said = command("verify", fails=True)
    assert said.startswith("error: outrider verify needs torch, which is not installed")
