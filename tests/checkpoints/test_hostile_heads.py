"""Whatever stands in the files of a head: it runs exactly, or it is refused in a sentence."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from outrider.base.config import EngineConfig
from outrider.base.types import Request, SamplingParams
from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.checkpoints.extras import KEY
from outrider.drafters.check import check
from outrider.drafters.registry import find_drafter
from outrider.engine.build import build_engine, load_target
from outrider.engine.setup import EngineSetup
from outrider.errors import ModelError
from outrider.models.base import Model
from outrider.native import choice as native
from tests.support.commands import outrider
from tests.support.heads import Eagle, make_head, make_medusa, save_head
from tests.support.mutations import change_header, mutate

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native step is off")
CONFIG = EngineConfig(
    memory=2**22, num_speculative_tokens=3, max_draft_nodes=6, max_model_len=48, max_num_seqs=1,
    max_num_batched_tokens=32, page_size=4,
)  # fmt: skip
KINDS = ("eagle", "safeailab", "peagle", "medusa")
Change = Callable[[Path], None]
EXTRAS = {
    "recommended_tokens": {"chat": 3, "code": 4},
    "measured": [{"use": "chat", "temperature": 0.5, "acceptance_length": 1.5, "prompts": 4,
                  "by_position": [0.5], "digest": "a", "data": "b", "date": "c", "machine": "d"}],
}  # fmt: skip


class Bench:
    """A target, its heads, and what it says without them."""

    def __init__(self, folder: Path, root: Path) -> None:
        self.folder, self.root = folder, root
        config = AutoConfig.from_pretrained(folder)
        head = make_head(Eagle(drafted=97, extra={KEY: EXTRAS}), config)
        save_head(head, root / "eagle")
        save_head(head, root / "safeailab", "safeailab", embeds=False)
        windowed = Eagle(drafted=97, parallel=True, window=5)
        save_head(make_head(windowed, config), root / "peagle")
        make_medusa(root / "medusa", config.hidden_size, config.vocab_size)
        about = root / "medusa" / "config.json"
        tree = {"medusa_choices": [[0], [1], [0, 0], [0, 1]]}
        about.write_text(json.dumps(json.loads(about.read_text()) | tree))
        self.checkpoint = open_checkpoint(folder)
        self.target: Model = load_target(self.checkpoint, CONFIG)
        self.plain = self.tokens("none")

    def tokens(self, drafter: str, config: EngineConfig = CONFIG) -> list[int]:
        """What a request is answered, with a drafter."""
        spec = find_drafter(drafter, self.folder)
        engine = build_engine(EngineSetup(self.checkpoint, spec, config, None), model=self.target)
        found: list[int] = []
        engine.add(Request("a", (5, 6, 7, 8, 9), SamplingParams(max_tokens=8), 3))
        self.drafts = 0
        while engine.has_work:
            for event in engine.step():
                found += [] if event.token_id is None else [event.token_id]
                self.drafts += event.drafted is not None
        assert not engine.menu.switched_off
        return found

    def attempt(self, head: Path) -> str:
        """Draft with a head: "ran", or the sentence that refuses it. The check says the same."""
        try:
            kind, facts = check(head, self.folder)
            fits = all(fact.fits for fact in facts)
        except ModelError as error:
            kind, fits = "", False
            sentence(error)
        tokens, said = self.plain, ""
        try:
            tokens = self.tokens(str(head))
        except ModelError as error:
            said = sentence(error)
        assert tokens == self.plain
        # The check reads no values, and loads no model.
        assert fits != bool(said) or kind == "model" or "not a finite number" in said, said
        return said or "ran"


def sentence(error: ModelError) -> str:
    said = str(error)
    assert "\n" not in said
    assert 20 < len(said) < 700, said
    assert "native step refused" not in said, said
    return said


@pytest.fixture(scope="module")
def bench(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tiny_llama, tmp_path_factory.mktemp("heads"))


def copied(bench: Bench, kind: str, out: Path) -> Path:
    shutil.rmtree(out, ignore_errors=True)
    return shutil.copytree(bench.root / kind, out)


@pytest.mark.parametrize("kind", KINDS)
def test_an_unchanged_head_runs(bench: Bench, kind: str) -> None:
    assert bench.attempt(bench.root / kind) == "ran"
    assert bench.drafts > 1


HOSTILE: list[Any] = [
    None, True, 0, -1, 7, 2**31 - 1, 2**31, 2**64, 10**400, 0.5, 1e308, float("nan"), "x", [],
    [2**31], {}, {"a": 1},
]  # fmt: skip


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to all values of a config."""
    for key, value in tree.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from places(value, (*path, key))


def hostile_configs(bench: Bench, kind: str, head: Path, step: int) -> list[str]:
    """What comes of every field with every ``step``-th of the values, which differ by field."""
    file = head / "config.json"
    config, outcomes = json.loads(file.read_text()), []
    for number, path in enumerate(places(config)):
        for value in HOSTILE[number % step :: step]:
            changed = copy.deepcopy(config)
            holder = changed
            for key in path[:-1]:
                holder = holder[key]
            holder[path[-1]] = value
            file.write_text(json.dumps(changed))
            outcomes.append(bench.attempt(head))
    return outcomes


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_values_of_a_config(bench: Bench, kind: str, tmp_path: Path) -> None:
    outcomes = hostile_configs(bench, kind, copied(bench, kind, tmp_path / "head"), 6)
    assert outcomes.count("ran") < len(outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_hostile_value_of_a_config(bench: Bench, kind: str, tmp_path: Path) -> None:
    hostile_configs(bench, kind, copied(bench, kind, tmp_path / "head"), 1)


OPTIONAL = {"t2d", "embed_tokens.weight", *(f"{head}.0.linear.bias" for head in range(3))}
TENSORS: list[Callable[[torch.Tensor], torch.Tensor | None]] = [
    lambda t: None,
    lambda t: t.to(torch.bool),
    lambda t: t.to(torch.int8),
    lambda t: t.to(torch.float64),
    lambda t: t.float().to(torch.float8_e4m3fn),
    lambda t: t.reshape(-1)[:0],
    lambda t: t.reshape(-1)[0].clone(),
    lambda t: t[None].clone(),
    lambda t: t.transpose(0, -1).contiguous(),
    lambda t: torch.cat([t, t]),
    lambda t: torch.full(t.shape, torch.inf),
    lambda t: torch.full(t.shape, torch.nan),
    lambda t: torch.full(t.shape, 2**62, dtype=torch.int64),
    lambda t: torch.full(t.shape, -(2**63), dtype=torch.int64),
]


def hostile_tensors(bench: Bench, kind: str, head: Path, step: int) -> None:
    """Every tensor is missing, of another type or shape, or full of what no weight is."""
    (file,) = head.glob("*.safetensors")
    tensors = load_file(file)
    for number, (name, tensor) in enumerate(tensors.items()):
        for change in TENSORS[number % step :: step]:
            made = change(tensor)
            others = {n: t for n, t in tensors.items() if n != name}
            save_file(others if made is None else {**others, name: made}, file)
            said = bench.attempt(head)
            if made is None:
                assert (said == "ran") == (name in OPTIONAL)


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_tensors(bench: Bench, kind: str, tmp_path: Path) -> None:
    hostile_tensors(bench, kind, copied(bench, kind, tmp_path / "head"), 5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_hostile_tensor(bench: Bench, kind: str, tmp_path: Path) -> None:
    hostile_tensors(bench, kind, copied(bench, kind, tmp_path / "head"), 1)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3e38, -3e38, 1e-45])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_overflow_change_nothing(
    bench: Bench, kind: str, value: float, tmp_path: Path
) -> None:
    """Weights that are not quantised are not looked at; what they lead to is never accepted."""
    head = copied(bench, kind, tmp_path / "head")
    (file,) = head.glob("*.safetensors")
    tensors = load_file(file)
    plain = replace(CONFIG, drafter_quantization="none")
    for number, name in enumerate(sorted(tensors)):
        if tensors[name].is_floating_point() and number % 3 == 0:
            save_file({**tensors, name: torch.full(tensors[name].shape, value)}, file)
            assert bench.tokens(str(head), plain) == bench.plain


def header(change: Callable[[dict[str, Any]], object]) -> Change:
    """Rewrite the header of a safetensors file; offsets stay relative to its end."""

    def rewrite(folder: Path) -> None:
        file = folder / "model.safetensors"
        data = file.read_bytes()
        size = int.from_bytes(data[:8], "little")
        about = json.loads(data[8 : 8 + size])
        change(about)
        text = json.dumps(about).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])

    return rewrite


def weights(change: Callable[[bytes], bytes]) -> Change:
    def rewrite(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(change(file.read_bytes()))

    return rewrite


def config(text: bytes) -> Change:
    return lambda folder: (folder / "config.json").write_bytes(text) and None


def as_folder(name: str) -> Change:
    def replace(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return replace


def as_link(name: str, to: str) -> Change:
    def replace(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(to)

    return replace


def index(weight_map: Any) -> Change:
    text = json.dumps({"weight_map": weight_map})
    return lambda folder: (folder / "model.safetensors.index.json").write_text(text) and None


def put(**values: Any) -> Callable[[dict[str, Any]], object]:
    """Change what a header says of one matrix."""
    return lambda about: about["fc.weight"].update(values)


FILES: dict[str, Change] = {
    **{f"cut to {n}": weights(lambda data, n=n: data[:n]) for n in (0, 4, 8, 100, 5000, -1)},
    "a tail": weights(lambda data: data + b"x"),
    "a header of 2**63 bytes": weights(lambda data: (2**63).to_bytes(8, "little") + data[8:]),
    "a header of zeros": weights(lambda data: data[:8] + bytes(len(data) - 8)),
    "a header that is a list": weights(lambda data: (2).to_bytes(8, "little") + b"[]" + data),
    "integers": header(put(dtype="I32")),
    "half as wide": header(put(dtype="F16")),
    "an unknown type": header(put(dtype="F99")),
    "a type of 4 bits": header(put(dtype="F4")),
    "no type": header(put(dtype=None)),
    "a shape below 0": header(put(shape=[-32, -96])),
    "a shape beyond all": header(put(shape=[2**62, 2**62])),
    "a text for a shape": header(put(shape="32")),
    "offsets that overlap": header(put(data_offsets=[0, 12288])),
    "offsets that go back": header(put(data_offsets=[12288, 0])),
    "offsets past the end": header(put(data_offsets=[2**40, 2**40 + 12288])),
    "offsets below 0": header(put(data_offsets=[-12288, 0])),
    "one offset": header(put(data_offsets=[0])),
    "a tensor that is a number": header(lambda about: about.update({"fc.weight": 3})),
    "a tensor less": header(lambda about: about.pop("fc.weight")),
    "no tensors": header(lambda about: about.clear()),
    "an empty config": config(b""),
    "a list for a config": config(b"[]"),
    "an empty object": config(b"{}"),
    "a config without end": config(b'{"a": ' * 100_000),
    "no text": config(b"\xff\xfe{}"),
    "a folder for a config": as_folder("config.json"),
    "a folder for weights": as_folder("model.safetensors"),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "no config": lambda folder: (folder / "config.json").unlink(),
    "a link to nothing": as_link("model.safetensors", "nothing"),
    "a link to itself": as_link("model.safetensors", "model.safetensors"),
    "a config that links to itself": as_link("config.json", "config.json"),
    "an index of files elsewhere": index({"fc.weight": "../other/model.safetensors"}),
    "an index of files that are missing": index({"fc.weight": "more.safetensors"}),
    "an index of nothing": index({}),
    "an index of numbers": index({"fc.weight": 3}),
}  # fmt: skip


@pytest.mark.parametrize("damage", FILES)
def test_damaged_files_are_refused(bench: Bench, damage: str, tmp_path: Path) -> None:
    head = copied(bench, "eagle", tmp_path / "head")
    FILES[damage](head)
    assert bench.attempt(head) != "ran"
    done = outrider("drafters", "check", bench.folder, "--drafter", head)
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)
    assert done.stderr.count("\n") <= 1


def test_mutated_headers_run_or_are_refused(bench: Bench, tmp_path: Path) -> None:
    outcomes = []
    for seed in range(60):
        draw = random.Random(seed)
        head = copied(bench, draw.choice(KINDS), tmp_path / "head")
        (file,) = head.glob("*.safetensors")
        change_header(file, draw)
        outcomes.append(bench.attempt(head))
    assert outcomes.count("ran") < len(outcomes)


def test_mutated_configs_run_or_are_refused(bench: Bench, tmp_path: Path) -> None:
    outcomes = []
    for seed in range(60):
        draw = random.Random(seed)
        head = copied(bench, draw.choice(KINDS), tmp_path / "head")
        file = head / "config.json"
        file.write_text(json.dumps(mutate(json.loads(file.read_text()), draw)))
        outcomes.append(bench.attempt(head))
    assert 0 < outcomes.count("ran") < len(outcomes)


@pytest.mark.parametrize("damage", ["cut to 100", "integers", "a list for a config", "no weights"])
def test_generating_with_a_damaged_head_ends_with_1(
    bench: Bench, damage: str, tmp_path: Path
) -> None:
    head = copied(bench, "eagle", tmp_path / "head")
    FILES[damage](head)
    done = outrider("generate", bench.folder, "--prompt", "x", "--drafter", head)
    assert done.exit_code == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
