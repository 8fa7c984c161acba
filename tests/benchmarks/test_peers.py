"""The peers' harness, with made-up peers: what they answer is exact, so the figures are too."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner, Result

from benchmarks import install
from benchmarks.__main__ import application
from benchmarks.peers import known, measure, pairs
from benchmarks.peers.known import OWN, Peer
from benchmarks.peers.markdown import brief, markdown
from benchmarks.peers.measure import Bench, first_difference
from benchmarks.peers.pairs import Pair, Recipe
from benchmarks.peers.report import report
from benchmarks.peers.session import PeerError, Pool, Session
from benchmarks.peers.settings import Options
from outrider.errors import ConfigError

# Decode speed is `speed`, in plain mode, and K times that with a draft of K tokens, up to 6; all
# requests of a batch share it.
FAKE = """
import json, sys
settings = json.loads(sys.argv[1])
spec = json.loads(sys.stdin.readline())
if spec["mode"] in settings.get("refuses", []):
    print(json.dumps({"error": "no such mode here"}), flush=True)
    sys.exit()
print(json.dumps({"ready": True, "version": "1.0"}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if settings.get("dies"):
        sys.exit(3)
    prompts, n = asked["prompts"], asked["max_tokens"]
    k, threads = asked["k"], spec["threads"]
    assert k <= spec["k"]
    assert max(map(len, prompts)) + n <= spec["context"]
    assert len(prompts) <= spec["parallel"]
    speed = settings["speed"] * threads * (k if 1 <= k <= 6 else 1)
    if spec["mode"] == "ngram":
        speed /= 2
    starts = [prompt[-1] + (settings.get("wrong", False) and n > 4) for prompt in prompts]
    ids = [[(start + i) % 97 for i in range(n - settings.get("short", 0))] for start in starts]
    first = 0.5
    if "opened" in settings:
        with open(settings["opened"], "a") as file:
            print(spec["mode"], spec["k"], k, n, asked["once"], file=file)
    seconds = first + len(prompts) * (n - 1) / speed
    whole = asked["once"] and n > 1
    print(json.dumps({"ids": ids, "first": None if whole else first, "seconds": seconds,
                      "peak_memory": 1000 * threads}), flush=True)
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(install.HOME_VARIABLE, str(tmp_path / "home"))
    monkeypatch.setattr(measure, "read_bandwidth", lambda: 1000.0)
    monkeypatch.setattr(measure, "peak_rate", lambda *_: 100.0)
    return tmp_path / "home"


@pytest.fixture
def fake(tmp_path: Path) -> Callable[..., Peer]:
    script = tmp_path / "fake.py"
    script.write_text(FAKE, encoding="utf-8")

    def make(name: str, **settings: Any) -> Peer:
        command = (sys.executable, "-IS", str(script), json.dumps({"speed": 10.0, **settings}))
        return Peer(name, command)

    return make


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    for name in ("target", "drafter"):
        (tmp_path / name).mkdir()
        save_file({"x": np.zeros((2, 3), np.float32)}, tmp_path / name / "model.safetensors")
        config = {
            "model_type": "llama",
            "vocab_size": 1,
            "hidden_size": 3,
            "num_attention_heads": 1,
        }
        (tmp_path / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
    prompts = [[1, 2], [3, 4, 5], [6], [7]]
    return Pair("made-up", tmp_path / "target", tmp_path / "drafter", prompts, 2)


def benchmark(name: str, *args: object) -> Result:
    return CliRunner().invoke(application(name), [name, *map(str, args)])


OPTIONS = Options(dtypes=("float32",), max_tokens=9, threads=(1, 2))


def measured(pair: Pair, options: Options, *sides: Peer) -> dict[str, Any]:
    bench = Bench(pair, list(sides), options)
    bench.run()
    (found,) = report([bench])["pairs"]
    assert isinstance(found, dict)
    return found


def test_each_side_runs_at_its_best_and_ratios_are_exact(
    fake: Callable[..., Peer], pair: Pair
) -> None:
    found = measured(pair, OPTIONS, fake(OWN, speed=30.0), fake("other", speed=20.0))
    shown = [(r["peer"], r["mode"], r["num_speculative_tokens"], r["threads"])
             for r in found["runs"]]  # fmt: skip
    assert sorted(shown) == [
        ("other", "draft", 6, 2), ("other", "plain", 0, 2),
        (OWN, "draft", 6, 2), (OWN, "plain", 0, 2),
    ]  # fmt: skip
    by_mode = {(r["peer"], r["mode"]): r for r in found["runs"]}
    own = by_mode[OWN, "plain"]
    assert own["tokens_per_second"] == pytest.approx(60)
    assert len(own["tokens_per_second_by_round"]) == 7
    assert own["tokens_per_second_interval"] == pytest.approx((60, 60))
    assert own["end_to_end_tokens_per_second"] == pytest.approx(9 / (0.5 + 8 / 60))
    assert (own["ttft_ms"], own["peak_memory_bytes"]) == (pytest.approx(500), 2000)
    assert own["memory_share"] == pytest.approx((6 - 3) * 4 * 60 / 1000)  # but the embedding
    assert by_mode["other", "draft"]["memory_share"] is None
    assert by_mode["other", "draft"]["tokens_per_second"] == pytest.approx(240)
    assert all(r["identical_to_plain"] and r["identical_to_outrider"] for r in found["runs"])
    (ratio,) = found["ratios"]
    assert ratio["plain"]["ratio"] == pytest.approx(1.5)
    assert ratio["best"]["ratio"] == pytest.approx(1.5)
    assert (ratio["best"]["ours"], ratio["best"]["theirs"]) == ("draft", "draft")
    # Two threads, plain, and four lengths of two speculative modes: all settings of both sides.
    assert len(found["search"]) == 2 * ((1 + 1) + (4 + 1) + (4 + 1))
    assert found["skipped"] == []
    json.dumps(found)


def test_a_report_in_markdown(fake: Callable[..., Peer], pair: Pair) -> None:
    bench = Bench(pair, [fake(OWN, speed=30.0), fake("other", speed=20.0)], OPTIONS)
    bench.run()
    written = json.loads(json.dumps(report([bench])))
    lines = list(markdown(written))
    assert lines[0].startswith("made-up · 9 tokens, T = 0")
    bar = "| float32 | decode | other | 1.50* [1.50 1.50] | 1.50* [1.50 1.50] | draft / draft |"
    assert bar in lines
    own = (
        "| float32 | decode | outrider 1.0 | plain |  | 2 | 60 [60 60] | 72% |  |  | 14 | "
        "500 | 0 | 32.00 | yes | yes |"
    )
    assert any(line.startswith(own) for line in lines)
    assert all(line.count("|") in (0, 7, 18) for line in lines)
    fastest = "1.50 [1.50 1.50] other"
    row = ["made-up", "float32", "decode", fastest, fastest, "60", "72%", "360"]
    assert list(brief(written)) == [row]


def test_the_bar_is_the_fastest_peer(fake: Callable[..., Peer], pair: Pair) -> None:
    peers = [fake("slow", speed=10.0), fake("fast", speed=60.0), fake("middling", speed=20.0)]
    (bar,) = measured(pair, OPTIONS, fake(OWN, speed=30.0), *peers)["bars"]
    assert (bar["plain"]["peer"], bar["best"]["peer"]) == ("fast", "fast")
    assert bar["plain"]["ratio"] == pytest.approx(0.5)
    assert bar["geometric_mean"] == pytest.approx(0.5)


def test_other_ids_are_shown(fake: Callable[..., Peer], pair: Pair) -> None:
    found = measured(pair, OPTIONS, fake(OWN), fake("other", wrong=True))
    theirs = [run for run in found["runs"] if run["peer"] == "other"]
    assert [run["identical_to_plain"] for run in theirs] == [True, True]
    assert [run["identical_to_outrider"] for run in theirs] == [False, False]
    assert [run["first_difference"] for run in theirs] == [0, 0]


def test_noise_of_their_own_is_not_compared(fake: Callable[..., Peer], pair: Pair) -> None:
    found = measured(pair, replace(OPTIONS, temperature=1.0), fake(OWN), fake("other", wrong=True))
    identical = {(r["peer"], r["identical_to_plain"]) for r in found["runs"]}
    assert identical == {(OWN, True), ("other", None)}


def test_what_cannot_run_is_skipped_with_the_reason(
    fake: Callable[..., Peer], pair: Pair, capfd: pytest.CaptureFixture[str]
) -> None:
    absent = replace(fake("absent"), missing=lambda: "not installed in X; run: make peers")
    sides = [
        fake(OWN), absent, fake("plain-only", refuses=["draft", "ngram"]), fake("dying", dies=True),
        fake("short", short=1), Peer("nowhere", ("/no/such/program",)),
    ]  # fmt: skip
    found = measured(pair, OPTIONS, *sides)
    reasons = {(s["peer"], s["mode"]): s["reason"] for s in found["skipped"]}
    assert reasons["absent", None] == "not installed in X; run: make peers"
    assert reasons["plain-only", "draft"] == "no such mode here"
    assert reasons["dying", "plain"].startswith("it ended with code 3; its log: ")
    assert reasons["short", "plain"] == "it gave 8 tokens, not 9"
    assert "cannot be run" in reasons["nowhere", "plain"]
    assert {r["peer"] for r in found["runs"]} == {OWN, "plain-only"}
    (ratio,) = found["ratios"]
    assert (ratio["best"]["ours"], ratio["best"]["theirs"]) == ("draft", "plain")
    assert "absent: skipped: not installed" in capfd.readouterr().err


def test_a_dtype_that_a_peer_lacks_is_skipped(fake: Callable[..., Peer], pair: Pair) -> None:
    other = replace(fake("other"), dtypes=("float32",))
    own = replace(fake(OWN), dtypes=("float32", "bfloat16"))
    found = measured(pair, replace(OPTIONS, dtypes=("float32", "bfloat16")), own, other)
    assert [(s["peer"], s["dtype"]) for s in found["skipped"]] == [("other", "bfloat16")]
    assert {(r["peer"], r["dtype"]) for r in found["runs"]} == {
        (OWN, "float32"), (OWN, "bfloat16"), ("other", "float32"),
    }  # fmt: skip


def test_a_drafter_of_8_bits_beside_a_target_of_more(fake: Callable[..., Peer], pair: Pair) -> None:
    """Whoever has weights of 8 bits may draft with them; the target stays as it is."""
    few = tuple(replace(fake(n), dtypes=("float32", "int8")) for n in (OWN, "few"))
    options = replace(OPTIONS, dtypes=("float32", "int8"))
    found = measured(pair, options, *few, fake("no-8-bits"))
    modes = {(s["peer"], s["dtype"], s["mode"]) for s in found["search"]}
    assert {peer for peer, _, mode in modes if mode == "draft int8"} == {OWN, "few"}
    assert {dtype for _, dtype, mode in modes if mode == "draft int8"} == {"float32"}


def test_batches_and_prefill(fake: Callable[..., Peer], pair: Pair) -> None:
    options = replace(OPTIONS, concurrency=(1, 3), prefill=12)
    alone = replace(fake("alone"), batches=False)
    found = measured(pair, options, fake(OWN, speed=30.0), fake("other", speed=20.0), alone)
    speeds = {(r["peer"], r["load"], r["mode"]): r["tokens_per_second"] for r in found["runs"]}
    # 3 requests of 9 tokens, all at 60 tokens/s after T(1) = 0.5 s; a prompt of 12 in T(1).
    assert speeds[OWN, "batch 3", "plain"] == pytest.approx(27 / (0.5 + 24 / 60))
    assert speeds[OWN, "batch 3", "draft"] == pytest.approx(27 / (0.5 + 24 / 360))
    assert {s for (_, load, _), s in speeds.items() if load == "prefill 12"} == {24.0}
    assert {load for peer, load, _ in speeds if peer == "alone"} == {"decode", "prefill 12"}
    assert [(s["peer"], s["load"]) for s in found["skipped"]] == [("alone", "batch 3")]
    assert all(run["identical_to_outrider"] for run in found["runs"])
    assert {bar["load"] for bar in found["bars"]} == {"decode", "batch 3", "prefill 12"}
    # Of 2 matrices of 3 the embedding is looked up, and the last row alone meets the head.
    shares = {r["load"]: r["peak_share"] for r in found["runs"] if r["peer"] == OWN}
    assert shares == {"decode": None, "batch 3": None, "prefill 12": pytest.approx(3 / 0.5 / 100)}
    # The prompts' heads, and 8 steps of 3 products each for the peak, or of 12 bytes for memory.
    shares = {r["load"]: r["roofline_share"] for r in found["runs"] if r["mode"] == "plain"}
    least = 3 * 3 / 100 + 8 * max(3 * 3 / 100, 12 / 1000)
    assert shares == {
        "decode": None, "batch 3": pytest.approx(least / (0.5 + 24 / 40)), "prefill 12": None
    }  # fmt: skip


def test_a_peer_that_can_keeps_its_process_for_every_length(
    fake: Callable[..., Peer], pair: Pair, tmp_path: Path
) -> None:
    """And for every load; T(1) of several requests is measured in the first round alone."""
    calls = {name: tmp_path / name for name in (OWN, "other")}
    sides = [fake(name, opened=str(file)) for name, file in calls.items()]
    sides[0] = replace(sides[0], lengths=True)
    options = replace(OPTIONS, concurrency=(3,), batch_tokens=5, modes=("draft",))
    found = measured(pair, options, *sides)
    assert all(run["num_speculative_tokens"] == 6 for run in found["runs"])
    assert all(run["ttft_ms"] == 500 for run in found["runs"])
    said = {
        name: [line.split() for line in file.read_text(encoding="utf-8").splitlines()]
        for name, file in calls.items()
    }
    longest = str(max(options.lengths))
    assert {opened for _, opened, *_ in said[OWN]} == {longest}
    assert {k for _, _, k, *_ in said[OWN]} == set(map(str, options.lengths))
    assert all(opened == k for _, opened, k, *_ in said["other"])
    for lines in said.values():
        assert sum(once == "False" for *_, once in lines) == 1
        assert {tokens for *_, tokens, _ in lines} == {"5"}


def test_one_process_serves_every_load(
    fake: Callable[..., Peer], pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[str, str]] = []
    before = Bench._open

    def open_(bench: Bench, setting: Any) -> Session:
        opened.append((setting.peer, setting.mode))
        return before(bench, setting)

    monkeypatch.setattr(Bench, "_open", open_)
    loads = replace(OPTIONS, concurrency=(1, 3), prefill=12)
    options = replace(loads, modes=("plain", "draft"), threads=(1,))
    found = measured(pair, options, replace(fake(OWN), lengths=True), fake("other"))
    assert {run["load"] for run in found["runs"]} == {"decode", "batch 3", "prefill 12"}
    assert [mode for peer, mode in opened if peer == OWN] == ["plain", "draft"]
    assert len([mode for peer, mode in opened if peer == "other"]) > 3


def test_prompts_are_cut(fake: Callable[..., Peer], pair: Pair) -> None:
    found = measured(pair, replace(OPTIONS, prompt_tokens=2), fake(OWN), fake("other"))
    assert found["prompt_tokens"] == [2] * found["prompts"]


def converter(tmp_path: Path) -> tuple[str, ...]:
    script = tmp_path / "convert.py"
    script.write_text(
        "import sys, pathlib\n"
        "log = pathlib.Path(sys.argv[2]) / 'calls'\n"
        "log.write_text((log.read_text() if log.exists() else '') + sys.argv[3] + ' ')\n"
        "(log.parent / 'weights').write_bytes(b'weight')\n",
        encoding="utf-8",
    )
    return (sys.executable, "-IS", str(script))


def test_a_conversion_is_made_once_and_checked(
    fake: Callable[..., Peer], pair: Pair, tmp_path: Path
) -> None:
    other = replace(fake("other"), converter=converter(tmp_path), weights="weights")
    for _ in range(2):
        found = measured(pair, OPTIONS, fake(OWN), other)
        assert found["skipped"] == []
    folder = other.conversions(pair.target) / "float32"
    assert (folder / "calls").read_text() == "float32 "
    assert found["conversions"] == [{"peer": "other", "now": False}]
    assert {run["bits_per_weight"] for run in found["runs"] if run["peer"] == "other"} == {8.0}
    save_file({"x": np.ones((2, 4), np.float32)}, pair.target / "model.safetensors")
    assert other.conversions(pair.target) != folder.parent


def test_a_wrong_conversion_is_not_measured(
    fake: Callable[..., Peer], pair: Pair, tmp_path: Path
) -> None:
    other = replace(fake("other", wrong=True), converter=converter(tmp_path), weights="weights")
    found = measured(pair, OPTIONS, fake(OWN), other)
    assert [s["reason"] for s in found["skipped"]] == [
        "its greedy float32 ids part from Outrider's at token 0: the conversion is wrong"
    ]
    assert {r["peer"] for r in found["runs"]} == {OWN}


def test_first_difference() -> None:
    assert first_difference([[1, 2], [3]], [[1, 2], [3]]) is None
    assert first_difference([[1, 2], [3]], [[1, 4], [3]]) == 1
    assert first_difference([[1, 2], [3]], [[1, 2], [3, 4]]) == 1


@pytest.mark.parametrize(
    "wrong",
    [{"rounds": 0}, {"max_tokens": 1}, {"temperature": -1.0}, {"prefill": -1},
     {"concurrency": (1, 33)}],
)  # fmt: skip
def test_options_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Options(**wrong)


SERVED = """
from runners.serve import Unsupported, serve

class Runner:
    version = "2.0"
    def __init__(self, spec):
        if spec["mode"] == "ngram":
            raise Unsupported("no lookup")
        print("a library's greeting", flush=True)
        self.settings = spec["k"], spec["threads"]
    def generate(self, prompts, max_tokens, options):
        if options["seed"] == 13:
            raise ValueError("unlucky")
        print("progress", flush=True)
        return [[*self.settings, max_tokens][-max_tokens:] for _ in prompts]

serve(Runner)
"""


@pytest.fixture
def served(tmp_path: Path) -> Callable[[str], Session]:
    script = tmp_path / "served.py"
    script.write_text(SERVED, encoding="utf-8")
    command = (sys.executable, "-P", str(script))

    def start(mode: str) -> Session:
        variables = {"PYTHONPATH": str(known.FOLDER)}
        spec = {"mode": mode, "k": 4, "threads": 2}
        return Session(command, spec, tmp_path / "log" / "x", variables)

    return start


def test_the_protocol(served: Callable[[str], Session]) -> None:
    session = served("plain")
    assert session.version == "2.0"
    answer = session.run([[1], [2]], 3, 0.0, 0)
    assert answer.ids == [[4, 2, 3], [4, 2, 3]]
    assert answer.first is not None
    assert answer.first > 0
    assert answer.seconds > 0
    assert answer.peak_memory > 1_000_000
    assert answer.others >= 0
    with pytest.raises(PeerError, match="ValueError: unlucky"):
        session.run([[1]], 3, 0.0, 13)
    once = session.run([[1], [2]], 1, 0.0, 0)
    assert once.ids == [[1], [1]]
    assert once.first == once.seconds
    assert "a library's greeting" in session.log.read_text()
    session.close()
    assert session.process.poll() == 0


def test_a_runner_that_cannot_says_why(served: Callable[[str], Session]) -> None:
    with pytest.raises(PeerError, match=r"^no lookup$"):
        served("ngram")


def test_sessions_used_longest_ago_make_room() -> None:
    class Stub:
        def close(self) -> None:
            closed.append(self)

    closed: list[Any] = []
    opened: list[str] = []

    def open_(key: str) -> Any:
        opened.append(key)
        return Stub()

    pool: Pool[str] = Pool(open_, lambda _: 60, lambda: 100 - 40 * len(pool.sessions))
    for key in ("a", "a", "b", "a"):
        pool.get(key)
    assert opened == ["a", "b"]
    pool.get("c")  # b goes: a was used after it
    assert list(pool.sessions) == ["a", "c"]
    pool.get("b")
    assert opened == ["a", "b", "c", "b"]
    pool.close()
    assert len(closed) == 4


TINY = Recipe(
    "tiny", vocabulary=4200, hidden=32, intermediate=48, layers=3, heads=4, kv_heads=2, tied=True,
    theta=1e4, later=0.0,
)  # fmt: skip


def test_a_planted_pair_is_made_once_by_its_seed(
    home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(pairs.RECIPES, "tiny", TINY)
    found = pairs.find_pair("tiny")
    assert found.target.is_relative_to(home)
    # Later layers add nothing, so that the first two alone say the same.
    assert found.agreement == 1.0
    assert "agrees on 1.000" in capfd.readouterr().err
    assert [len(p) for p in found.prompts] == [pairs.PROMPT_TOKENS] * pairs.PROMPTS
    assert len(found.long_prompt(5000)) == 5000
    config = json.loads((found.target / "config.json").read_text())
    drafter = json.loads((found.target / "drafter" / "config.json").read_text())
    assert (config["num_hidden_layers"], drafter["num_hidden_layers"]) == (3, 2)
    before = (found.target / "model.safetensors").stat().st_mtime_ns
    assert pairs.find_pair("tiny", 1).single == 1
    assert (found.target / "model.safetensors").stat().st_mtime_ns == before


def test_planted_weights_depend_on_the_seed_alone() -> None:
    first, again = dict(TINY.tensors()), dict(TINY.tensors())
    other = dict(replace(TINY, seed=1).tensors())
    assert all(np.array_equal(first[name], again[name]) for name in first)
    name = "model.embed_tokens.weight"
    assert not np.array_equal(first[name], other[name])
    drafted = {name for name in first if TINY.drafters(name)}
    assert {int(n.split(".")[2]) for n in drafted if ".layers." in n} == {0, 1}
    assert {name, "model.norm.weight"} <= drafted


def test_the_pocket_pair_has_prompts() -> None:
    found = pairs.find_pair("pocket")
    assert found.drafter is not None
    assert found.single == 4
    assert len({tuple(prompt) for prompt in found.prompts}) == pairs.PROMPTS
    with pytest.raises(ConfigError, match="num_prompts is 0"):
        pairs.find_pair("pocket", 0)


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: Path) -> None:
    assert install.home() == home
    monkeypatch.delenv(install.HOME_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert install.home() == tmp_path / "outrider" / "peers"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert install.home() == Path.home() / ".cache" / "outrider" / "peers"


def test_an_environment_is_ready_with_these_very_pins(home: Path) -> None:
    environment = install.Environment("x", ("a==1",), ("b",))
    assert not environment.ready
    environment.stamp.parent.mkdir(parents=True)
    environment.stamp.write_text(json.dumps(environment.recipe))
    assert environment.ready
    assert not replace(environment, requirements=("a==2",)).ready
    assert install.missing("transformers") is None
    assert "make peers" in (install.missing("vllm") or "")


def test_setting_up_goes_on_when_a_peer_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Failing(install.Environment):
        def install(self) -> None:
            command = "print('no wheel'); exit(1)"
            install.call(sys.executable, "-c", command, log=install.home() / "log")

    chosen = {"bad": (Failing("bad", ()),), "good": ()}
    monkeypatch.setattr(install, "ENVIRONMENTS", chosen)
    done = benchmark("install")
    said = done.stderr
    assert done.exit_code == 1
    assert "bad: skipped: python" in said
    assert "(no wheel)" in said
    assert "good: ready" in said


@pytest.fixture
def two_peers(
    fake: Callable[..., Peer], pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Peer]:
    made = {name: fake(name, speed=s) for name, s in ((OWN, 30.0), ("transformers", 20.0))}
    monkeypatch.setattr(known, "peers", lambda *_: made)
    monkeypatch.setattr(pairs, "find_pair", lambda *_: pair)
    return made


def test_the_command(two_peers: dict[str, Peer], tmp_path: Path) -> None:
    file, image = tmp_path / "x.json", tmp_path / "x.png"
    done = benchmark(
        "peers", "--peers", "transformers", "--dtype", "float32", "--max-tokens", 9,
        "--out", file, "--plot", image,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "| transformers 1.0 | plain |" in done.stdout
    assert "1.50*" in done.stdout
    (one,) = json.loads(file.read_text())["pairs"]
    assert one["ratios"][0]["plain"]["ratio"] == pytest.approx(1.5)
    assert image.read_bytes().startswith(b"\x89PNG")


def test_drafts_that_change_our_output_fail(
    two_peers: dict[str, Peer], fake: Callable[..., Peer], tmp_path: Path
) -> None:
    script = tmp_path / "changes.py"
    changed = FAKE.replace('settings.get("wrong", False)', 'spec["mode"] == "draft"')
    script.write_text(changed, encoding="utf-8")
    command = two_peers[OWN].command
    two_peers[OWN] = replace(two_peers[OWN], command=(*command[:2], str(script), command[3]))
    done = benchmark("peers", "--peers", "transformers", "--dtype", "float32")
    assert done.exit_code == 1
    assert "Outrider's outputs with drafts differ" in done.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--peers", "vllm,sglang"), "'sglang'"),
        (("--dtype", "float8"), "'float8'"),
        (("--rounds", "0"), "--rounds"),
        (("--max-tokens", "1"), "max_tokens is 1"),
        (("--concurrency", "2,x"), "'2,x'"),
        (("--plot", "x.svg"), "x.svg"),
        (("--out", "/no/such/folder/x.json"), "/no/such/folder"),
    ],
)
def test_what_is_asked_wrongly_is_said(args: tuple[str, ...], said: str) -> None:
    done = benchmark("peers", *args)
    assert done.exit_code == 2
    assert said in done.stderr


def test_runners_need_nothing_of_outrider_but_its_own() -> None:
    folder = known.FOLDER / "runners"
    for file in sorted(folder.glob("*.py")):
        if file.stem != "own":
            assert "from .." not in file.read_text(), file.name
            assert "import outrider" not in file.read_text(), file.name
    alone = (
        f"import sys; sys.path.append({str(known.FOLDER)!r}); import runners.serve; "
        "print('outrider' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", alone],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "False False\n"
