"""The command line, from outside: what it prints where, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider import LLM, SamplingParams, __version__, pocket
from outrider.audit import ties
from outrider.audit.ties import Difference
from outrider.base.types import Event, Origin
from outrider.cli import common
from outrider.cli import demo as cli_demo
from outrider.cli.generate import Screen
from tests.support.commands import outrider
from tests.support.pages import check_engine

PROMPT = "def greet(name):\n\treturn"
SHORT = ("--max-tokens", "12", "--seed", "3")


def expected(model: Path, **params: Any) -> list[str]:
    llm = LLM(model, drafter=None, max_num_seqs=2)
    options = {"temperature": 0.7, "max_tokens": 12, "seed": 3, **params}
    return [o.text for o in llm.generate(PROMPT, SamplingParams(**options))[0].outputs]


def test_help_waits_for_nothing_heavy() -> None:
    code = (
        "import sys, outrider.cli\n"
        "heavy = 'torch', 'transformers', 'numpy', 'matplotlib', 'pydantic', 'httpx', 'yaml'\n"
        "print([m for m in (*heavy, 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    shown = outrider("--help")
    assert shown.exit_code == 0
    assert all(command in shown.stdout for command in ("generate", "bench", "demo", "explain"))


def test_every_sampling_option_has_its_flag(tiny_llama: Path, tmp_path: Path) -> None:
    bias = ("--logit-bias", "40=3", "--logit-bias", "41=-100")
    penalties = ("--repetition-penalty", "1.2", "--presence-penalty", "0.5",
                 "--frequency-penalty", "0.1", "--bad-words", "fox")  # fmt: skip
    options = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.1,
               "bad_words": ["fox"], "logit_bias": {40: 3.0, 41: -100.0}}  # fmt: skip
    done = outrider("generate", tiny_llama, "--prompt", PROMPT, *SHORT, *bias, *penalties)
    assert done.stdout == expected(tiny_llama, **options)[0] + "\n"
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["fox", "dog"]}')
    for given in (schema, schema.read_text()):
        done = outrider("generate", tiny_llama, "--prompt", PROMPT, *SHORT, "--json-schema", given)
        assert json.loads(done.stdout) in ("fox", "dog")
    for form in (("--regex", "fox|dog"), ("--choice", "fox", "--choice", "dog"),
                 ("--grammar", 'start: "fox" | "dog"')):  # fmt: skip
        done = outrider("generate", tiny_llama, "--prompt", PROMPT, *SHORT, *form)
        assert done.stdout in ("fox\n", "dog\n")
    args = ("--model", tiny_llama, *SHORT, "--logprobs", "2", "--json")
    answer = json.loads(outrider("generate", "--prompt", PROMPT, *args).stdout)["outputs"][0]
    assert [len(found) in (2, 3) for found in answer["logprobs"]] == [True] * 12


def test_version() -> None:
    assert outrider("--version").stdout == f"outrider {__version__}\n"


def test_piped_text_is_the_text_and_a_newline(tiny_llama: Path, tmp_path: Path) -> None:
    (text,) = expected(tiny_llama)
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    for args, input in ((("--prompt", PROMPT), None), (("--file", file), None), ((), PROMPT)):
        done = outrider("generate", *args, "--model", tiny_llama, *SHORT, input=input)
        assert (done.exit_code, done.stdout_bytes) == (0, f"{text}\n".encode())
        assert done.stderr == ""


def test_a_lone_argument_is_a_model_where_it_reads_as_one(tiny_llama: Path) -> None:
    (text,) = expected(tiny_llama)
    for args in ((PROMPT, "--model", tiny_llama), (tiny_llama, PROMPT)):
        done = outrider("generate", *args, *SHORT)
        assert (done.stdout_bytes, done.stderr[:6]) == (f"{text}\n".encode(), "hint: ")
    done = outrider("generate", "/no/model.gguf", input="text")
    assert done.exit_code == 1
    assert done.stderr.startswith("error: /no/model.gguf")


def test_samples_come_one_after_the_other(tiny_llama: Path) -> None:
    texts = expected(tiny_llama, n=3)
    done = outrider("generate", tiny_llama, "--prompt", PROMPT, *SHORT, "--n", 3)
    assert done.stdout_bytes == "".join(f"{text}\n" for text in texts).encode()


def test_sampling_options_reach_the_engine(tiny_llama: Path) -> None:
    (text,) = expected(tiny_llama, temperature=1.3, top_k=9, top_p=0.8, min_p=0.02)
    sampling = ("--temperature", 1.3, "--top-k", 9, "--top-p", 0.8, "--min-p", 0.02)
    done = outrider("generate", tiny_llama, "--prompt", PROMPT, *SHORT, *sampling)
    assert done.stdout_bytes == f"{text}\n".encode()
    cut = next(c for c in text if c != "\N{REPLACEMENT CHARACTER}")
    done = outrider(
        "generate",
        tiny_llama,
        "--prompt",
        PROMPT,
        *SHORT,
        *sampling,
        "--stop",
        "zzz",
        "--stop",
        cut,
    )
    assert done.stdout_bytes == f"{text[: text.index(cut)]}\n".encode()


def test_json_tells_it_all_and_drafting_changes_no_token(tiny_llama: Path) -> None:
    found = {}
    for drafter in ("none", "ngram", tiny_llama):
        args = ("--drafter", drafter, "--num-speculative-tokens", 3, "--dtype", "float32")
        done = outrider("generate", tiny_llama, "--prompt", PROMPT, *SHORT, "--json", *args)
        assert done.exit_code == 0
        found[drafter] = json.loads(done.stdout)
    for output in found.values():
        assert set(output) == {"prompt", "prompt_token_ids", "outputs", "metrics"}
        assert output["prompt"] == PROMPT
        (sample,) = output["outputs"]
        names = {"index", "text", "token_ids", "finish_reason", "stop_reason", "seed", "origins"}
        assert set(sample) == names | {"logprobs", "cumulative_logprob"}
        assert len(sample["token_ids"]) == len(sample["origins"]) == 12
        assert sample["seed"] == 3
        assert sample["token_ids"] == found["none"]["outputs"][0]["token_ids"]
        assert sample["text"] == found["none"]["outputs"][0]["text"]
    assert set(found["none"]["outputs"][0]["origins"]) == {"plain"}
    assert found["none"]["metrics"]["acceptance_rate"] is None
    right = found[tiny_llama]  # the target as its own drafter is always right
    assert right["outputs"][0]["origins"][:5] == ["plain", *["accepted"] * 3, "bonus"]
    assert right["metrics"]["acceptance_rate"] == 1.0


def test_stats_go_to_stderr(tiny_llama: Path) -> None:
    args = ("--drafter", tiny_llama, "--num-speculative-tokens", 3, "--stats")
    done = outrider("generate", tiny_llama, "--prompt", PROMPT, *SHORT, *args)
    assert done.stdout_bytes == f"{expected(tiny_llama)[0]}\n".encode()
    lines = dict(line.split(maxsplit=1) for line in done.stderr.splitlines() if line.strip())
    assert lines["tokens"] == "12"
    assert lines["acceptance"].startswith("length")
    assert "███" in lines["survival"]
    assert "pages" in lines["budget"]


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (("generate", "--prompt", "x", "--temperature", "-1"), "temperature is -1.0"),
        (("generate", "--prompt", "x", "--n", "0"), "n is 0"),
        (
            ("generate", "--prompt", "x", "--num-speculative-tokens", "0"),
            "num_speculative_tokens is 0",
        ),
        (
            ("generate", "--prompt", "x", "--num-speculative-tokens", "256"),
            "num_speculative_tokens is 256",
        ),
        (("generate", "--prompt", "x", "--drafter", "nonsense"), "'nonsense'"),
        (("generate", "--prompt", "x", "--memory", "much"), "memory is 'much'"),
        (("generate", "--prompt", "x", "--dtype", "int3"), "dtype is 'int3'"),
        (("generate", "--prompt", "x", "--max-tokens", "many"), "--max-tokens"),
        (("generate", "x" * 300), "longer than the model's context"),
        (("generate", ""), "no tokens"),
        (("generate", "--file", "/no/such/file"), "does not exist"),
        (("generate", "--prompt", "x", "--file", __file__), "not both"),
        (("generate", "--prompt", "x", "--nonsense"), "--nonsense"),
        (("generate", "--prompt", "x", "--logit-bias", "a=1"), "give ID=BIAS"),
        (("generate", "--prompt", "x", "--logit-bias", "5000=1"), "logit_bias has token id 5000"),
        (("generate", "--prompt", "x", "--frequency-penalty", "3"), "frequency_penalty is 3.0"),
        (("generate", "--prompt", "x", "--regex", "("), "structured_outputs.regex cannot be used"),
        (
            ("generate", "--prompt", "x", "--regex", "a", "--choice", "b"),
            "give one of --json-schema",
        ),
        (("generate", "--prompt", "x", "--json-schema", "{"), "it is no JSON"),
        (("generate", "--prompt", "x", "--logprobs", "2"), "--logprobs needs --json"),
        (("bench", "--rounds", "3"), "--rounds"),
        (("bench", "--num-prompts", "100000"), "num_prompts is 100000"),
        (("bench", "--num-speculative-tokens", "two"), "'two'"),
        (("bench", "--num-speculative-tokens", "0"), "num_speculative_tokens is 0"),
        (("bench", "--temperature", "-1"), "temperature"),
        (("bench", "--max-tokens", "1"), "max_tokens is 1"),
        (("bench", "--max-tokens", "256"), "lower max_tokens"),
        (("bench", "--out", "/no/such/folder/x.json"), "/no/such/folder"),
        (("nonsense",), "nonsense"),
    ],
)
def test_bad_usage_is_told_and_exits_with_2(
    args: tuple[str, ...], part: str, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pocket, "prompts", lambda: [PROMPT] * 8)
    monkeypatch.setattr(pocket, "PATH", tiny_llama)
    done = outrider(*args)
    assert done.exit_code == 2
    assert part in done.stderr
    assert "Traceback" not in done.output


def test_a_prompt_that_is_no_text_is_refused(tiny_llama: Path) -> None:
    done = outrider("generate", "--model", tiny_llama, input=b"\xff\xfe")
    assert done.exit_code == 2
    assert "stdin is not UTF-8" in done.stderr


def test_what_fails_is_one_sentence_and_exits_with_1(tiny_llama: Path, tmp_path: Path) -> None:
    broken = tmp_path / "nan"
    broken.mkdir()
    for file in tiny_llama.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"][:] = torch.nan
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    for args in (("--model", broken), ("--model", broken, "--json"), ("--model", "/no/model")):
        done = outrider("generate", "--prompt", PROMPT, *args)
        assert (done.exit_code, done.stdout) == (1, "")
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
    done = outrider("generate", tiny_llama, "--prompt", PROMPT, "--memory", "1000")
    assert done.exit_code == 1
    assert "1000 bytes" in done.stderr


def test_ctrl_c_ends_cleanly(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = []

    def interrupted(self: LLM, *args: Any) -> Iterator[Event]:
        engines.append(self.engine)
        for i, event in enumerate(run(self, *args)):
            yield event
            if i == 2:
                raise KeyboardInterrupt

    run = LLM.run
    monkeypatch.setattr(LLM, "run", interrupted)
    done = outrider("generate", tiny_llama, "--prompt", PROMPT)
    assert (done.exit_code, done.stderr) == (130, "interrupted\n")
    del done  # the traceback holds the stream
    assert not engines[0].has_work
    check_engine(engines[0])


def test_ctrl_c_inside_a_callback_is_not_lost() -> None:
    """Python drops what a weak reference's callback raises; imports run such callbacks."""
    code = """
import signal, sys, time, weakref
from outrider import cli

def waits(**_):
    it = type("It", (), {})()
    reference = weakref.ref(it, lambda _: signal.raise_signal(signal.SIGINT))
    del it
    time.sleep(60)

cli.app = waits
cli.main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=30,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert "Exception ignored" not in done.stderr
    assert done.returncode == -signal.SIGINT


def test_a_broken_pipe_ends_silently(tiny_llama: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [
        sys.executable,
        "-m",
        "outrider",
        "generate",
        "--prompt",
        PROMPT,
        "--model",
        str(tiny_llama),
    ]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_warnings_are_one_line(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def warn(model: str | None) -> Path:
        warnings.warn("old= is an old spelling; use new=.", FutureWarning, stacklevel=2)
        return tiny_llama

    monkeypatch.setattr("outrider.cli.generate.model_folder", warn)
    done = outrider("generate", "--prompt", PROMPT, *SHORT)
    assert (done.exit_code, done.stderr) == (0, "warning: old= is an old spelling; use new=.\n")


def event(text: str, origin: Origin, sample: int = 0, end: str | None = None) -> Event:
    return Event("r", sample, 1, text, origin, end)


def test_a_terminal_gets_colours_and_no_control_characters(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    screen = Screen(terminal=True, colour=True)
    screen.take(event("a\n", Origin.ACCEPTED))
    screen.take(event("b\x1b", Origin.BONUS))
    screen.take(event("c", Origin.PLAIN, end="stop"))
    shown = capfdbinary.readouterr().out
    assert shown.decode() == "\x1b[32ma\n\x1b[0m\x1b[36mb␛\x1b[0mc\n"
    screen = Screen(terminal=True, colour=False)
    screen.take(event("a", Origin.ACCEPTED, end="stop"))
    assert capfdbinary.readouterr().out == b"a\n"


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert Screen.of_stdout().colour
    monkeypatch.setenv("NO_COLOR", "1")
    assert Screen.of_stdout().terminal
    assert not Screen.of_stdout().colour


def test_later_samples_wait_for_their_turn(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    screen = Screen(terminal=False, colour=False)
    screen.take(event("1", Origin.PLAIN, sample=1))
    screen.take(event("0", Origin.PLAIN, sample=0))
    screen.take(event("1", Origin.PLAIN, sample=1, end="stop"))
    screen.take(event("0", Origin.PLAIN, sample=0, end="stop"))
    assert capfdbinary.readouterr().out == b"00\n11\n"


def test_bars() -> None:
    assert common.bars([1.0, 0.5, 0.0]) == "█▄ "


def test_demo_shows_both_and_what_they_come_to(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pocket, "prompts", lambda: [PROMPT, "for word in"])
    monkeypatch.setattr(cli_demo, "TOKENS", 12)
    done = outrider("demo", "--model", tiny_llama)
    assert done.exit_code == 0, done.output
    assert done.stdout.count("identical: yes") == 3  # of each prompt, and of all
    for part in ("speedup:", "tokens/s", "Try next:", "outrider bench"):
        assert part in done.stdout
    assert done.stderr == ""
    real = Difference(9, (1, 2), 1.0, 0.0, False)
    monkeypatch.setattr(ties, "compare", lambda *args, **options: real)
    done = outrider("demo", "--model", tiny_llama)
    assert done.exit_code == 1
    assert "identical: no" in done.stdout
    assert "error: the outputs differ" in done.stderr
