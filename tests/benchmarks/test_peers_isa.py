"""The peers' harness below the machine's own instruction set, and with activations of 8 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from benchmarks import install
from benchmarks.__main__ import application
from benchmarks.peers import command, known, report
from benchmarks.peers.known import OWN, Peer
from benchmarks.peers.settings import Options
from outrider.base.config import Recipe
from outrider.errors import ConfigError
from outrider.native import choice


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(install.HOME_VARIABLE, str(tmp_path))
    return tmp_path


def asked(*args: str) -> Result:
    return CliRunner().invoke(application("peers"), ["peers", *args])


@pytest.mark.parametrize("isa", install.ISA_OPTIONS)
def test_every_side_is_told_its_limit(isa: str, home: Path) -> None:
    peers = known.peers(isa)
    assert peers[OWN].variables()[choice.VARIABLE] == isa
    kernels = peers["llama.cpp"].variables()["LD_LIBRARY_PATH"]
    assert kernels == str(home / f"llama.cpp-{isa}" / "build" / "bin")
    for name in ("transformers", "openvino", "vllm"):
        assert "ONEDNN_MAX_CPU_ISA" in peers[name].variables()
    assert {name for name, peer in peers.items() if peer.heeds} == {OWN, "llama.cpp"}
    limited = {**peers[OWN].environment, **peers["openvino"].environment}
    free = known.peers()
    assert not limited.keys() & {k for peer in free.values() for k in peer.environment}


def test_llama_cpp_needs_its_kernels_for_the_limit(home: Path) -> None:
    installed = install.LLAMA_CPP
    installed.stamp.parent.mkdir(parents=True)
    installed.stamp.write_text(str(installed.recipe).replace("'", '"'), encoding="utf-8")
    assert known.peers()["llama.cpp"].missing() is None
    assert "llama.cpp-avx2" in (known.peers("avx2")["llama.cpp"].missing() or "")


def test_kernels_are_built_without_what_lies_above() -> None:
    for isa, environment in install.LLAMA_CPP_BELOW.items():
        built = environment.build
        assert built.index("-DGGML_NATIVE=OFF") > built.index("-DGGML_NATIVE=ON")  # the last holds
        assert not any("AMX" in option for option in built)
        assert any("AVX512" in option for option in built) == (isa != "avx2")
        assert environment.targets == (install.CPU_LIBRARY,)
        assert install.ENVIRONMENTS[environment.name] == (environment,)


def cell(peer: str, ratio: float) -> dict[str, Any]:
    found = {"ratio": ratio, "interval": None, "ours": "plain", "theirs": "plain"}
    return {"dtype": "int8", "load": "decode", "peer": peer, "plain": found, "best": found}


@pytest.mark.parametrize(
    ("isa", "bar"), [(None, "openvino"), ("avx512bf16", "openvino"), ("avx2", "llama.cpp")]
)
def test_who_may_ignore_the_limit_sets_no_bar_below_the_machines_own(
    monkeypatch: pytest.MonkeyPatch, isa: str | None, bar: str
) -> None:
    monkeypatch.setattr(report, "available", lambda: ("portable", "avx2", "avx512bf16"))

    class Stub:
        options = Options(isa=isa)
        sides = known.peers()

    cells = [cell("llama.cpp", 1.5), cell("openvino", 1.2)]
    bench: Any = Stub()
    (found,) = report.bars(cells, report.counted(bench))
    assert found["plain"]["peer"] == bar


def test_activations_of_8_bits_are_a_choice_of_our_own() -> None:
    own, other = Peer(OWN, (), dtypes=known.DTYPES), Peer("other", (), dtypes=tuple(known.BITS))
    for dtype in ("int8-a8", "int4-a8"):
        assert own.form(dtype) == dtype
        assert other.form(dtype) == known.weights_of(dtype)
        assert str(Recipe.parse(own.form(dtype))) == dtype
    assert own.form("bfloat16") == other.form("bfloat16") == "bfloat16"


def test_drafters_of_fewer_bits_are_tried_where_there_are_any() -> None:
    few = Peer(OWN, (), dtypes=known.DTYPES)
    assert few.modes("bfloat16") == ("plain", "draft", "draft int8", "draft int4", "ngram")
    assert few.modes("int8-a8") == ("plain", "draft", "draft int4", "ngram")
    assert few.modes("int4") == ("plain", "draft", "ngram")
    assert Peer("none", ()).modes("bfloat16") == ("plain", "draft", "ngram")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--isa", "sse2"), "'sse2'"), (("--isa", ""), "--isa"), (("--isa", "avx2,amx"), "'amx'"),
        (("--mode", "fast"), "'fast'"), (("--num-speculative-tokens", "0"), "draft length is 0"),
        (("--num-speculative-tokens", "4,99"), "draft length is 99"),
        (("--threads", "0"), "thread count is 0"),
        (("--threads", "1,y"), "'1,y'"),
    ],
)  # fmt: skip
def test_what_is_asked_wrongly_is_said(args: tuple[str, ...], said: str) -> None:
    done = asked(*args)
    assert done.exit_code == 2
    assert said in done.stderr


def test_a_set_that_this_cpu_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "available", lambda: ("portable",))
    done = asked("--isa", "avx2")
    assert done.exit_code == 2
    assert "this CPU runs portable" in done.stderr


def test_lengths_are_checked() -> None:
    with pytest.raises(ConfigError, match="draft length"):
        Options(lengths=(0,))
