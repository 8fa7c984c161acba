"""``outrider train``: makes data, trains drafters on it, and measures and exports them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..base.extras import torch_for
from ..errors import ConfigError, OutriderError
from .common import (
    ApiKey,
    AsJson,
    counted,
    ended_cleanly,
    lines,
    new_table,
    numbers,
    report_console,
    screen,
    telling,
    write_json,
)
from .flags import argument, setting, with_flags
from .spelling import App

if TYPE_CHECKING:
    from ..training.plan import Plan
    from ..training.run_heads import Trained

app = App(no_args_is_help=True)
MODEL = "The target: a checkpoint's folder, .gguf file or hub name."
OUT = "The folder to write. Where it holds an interrupted run, the same command continues it."
PROMPTS = "A .jsonl file of prompts, a folder of such files, or a saved dataset."
DATA = "A folder that outrider train data wrote."
MAX_TOKENS = "Most tokens of an answer."
EPOCHS = "Passes over the samples."
BATCH = "Tokens of the target's answers in a batch, for each process."
STATES = (
    "Keep the target's hidden states beside the answers, so that training need not compute them: "
    "they take some kB of disk a token."
)
SKIP_BAD = "Leave out prompts that cannot be read or answered; otherwise the first one ends it."


@app.callback()
def train() -> None:
    """Train drafters on the target's own answers."""


@app.command()
def data(
    model: str = argument("MODEL", MODEL),
    prompts: Path | None = setting(
        None, f"{PROMPTS} The target writes prompts itself unless given."
    ),
    out: Path = setting(..., OUT, "--out", "-o"),
    temperature: str = setting(
        "0,0.8", "Temperatures of the answers, comma-separated: the prompts take turns at them."
    ),
    max_tokens: int = setting(256, MAX_TOKENS, min=1),
    context: int | None = setting(
        None, "Most tokens of a sample, prompt and answers; up to 1024 unless given.", min=16
    ),
    seed: int = setting(0, "The seed of prompts and answers.", min=0, max=2**20),
    samples: int | None = setting(
        None, "Prompts to answer. All unless given, or 5000 if the target writes them.", min=1
    ),
    skip_bad: bool = setting(False, SKIP_BAD, "--skip-bad"),
    states: bool = setting(False, STATES, "--states"),
    minutes: float | None = setting(
        None, "Minutes, about, after which it ends with the answers that there are."
    ),
    json_: AsJson = False,
) -> None:
    """Make training data: the target answers prompts."""
    with torch_for("outrider train", extra="train"):
        from ..training.data import DataOptions, make_data

    options = DataOptions(
        prompts=prompts, temperatures=numbers(temperature, float, "--temperature"),
        max_tokens=max_tokens, context=context, seed=seed, samples=samples, skip_bad=skip_bad,
        states=states, minutes=minutes,
    )  # fmt: skip
    console = screen(on_stderr=True)
    with ended_cleanly(), counted("answering") as told:
        written = make_data(model, out, options, told, console.print)
    shards = written.shards
    report = {
        "folder": str(out), "samples": sum(s.samples for s in shards),
        "tokens": sum(s.tokens for s in shards), "said": sum(s.said for s in shards),
    }  # fmt: skip
    if json_:
        write_json(report, "-")
    else:
        console.print(f"{out}: {report['samples']} samples, {report['said']} tokens to learn from")


@dataclass(frozen=True)
class TrainFlags:
    """The flags of all commands that train."""

    data: Path = setting(..., DATA)
    out: Path = setting(..., OUT, "--out", "-o")
    loss: str = setting("forward-kl", "forward-kl, reverse-kl, tvd, hard, coupled or hybrid.")
    epochs: float = setting(3.0, EPOCHS)
    steps: int | None = setting(None, "Optimiser steps, instead of epochs.", min=1)
    minutes: float | None = setting(None, "Minutes of training, about, instead of epochs.")
    batch: int = setting(2048, BATCH, min=1)
    accumulate: int = setting(1, "Batches whose gradients a step adds up.", min=1)
    seed: int = setting(0, "The seed of initial weights, sample order and draws.", min=0)
    bf16: bool | None = setting(
        None,
        "Multiply matrices in bf16. Usual where that is faster.",
        "--bf16/--no-bf16",
    )
    json_: AsJson = False

    def plan(self, rate: float) -> Plan:
        """Return how to train."""
        from ..training.plan import Plan

        if self.steps is not None and self.minutes is not None:
            raise ConfigError("give --steps or --minutes, not both.")
        return Plan(
            epochs=self.epochs, steps=self.steps, minutes=self.minutes, rate=rate,
            batch=self.batch, accumulate=self.accumulate, seed=self.seed, bf16=self.bf16,
        )  # fmt: skip

    def tell(self, trained: Trained) -> None:
        """Print what a trained drafter gives; of several processes only the first one prints."""
        from accelerate import PartialState

        if not PartialState().is_main_process:
            return
        if self.json_:
            served = [each._asdict() for each in trained.served]
            report = {"folder": str(self.out), **trained.judged._asdict(), "served": served}
            write_json(report, "-")
            return
        console = screen(on_stderr=True)
        for each in trained.served:
            console.print(
                f"T = {each.temperature:g}: acceptance length {each.acceptance_length:.2f}, "
                f"{each.speedup:.2f} times as fast as plain decoding, on "
                f"{len(each.lengths)} held-out prompts"
            )
        console.print(f"the drafter is in {self.out}")


@dataclass(frozen=True)
class HeadFlags(TrainFlags):
    """The flags of the commands that train heads."""

    begin: str | None = setting(
        None, "The head to start from: a folder or hub name; a new one unless given.", "--from"
    )
    depth: int = setting(4, "Draft length in training.", min=1, max=16)
    batch: int = setting(512, BATCH, min=1)
    rate: float | None = setting(None, "The learning rate; 2e-3 unless given.")


@dataclass(frozen=True)
class DistillFlags(TrainFlags):
    """The flags of the command that trains small drafters."""

    begin: str | None = setting(
        None,
        "The model to start from: a folder, .gguf file or hub name; new unless given.",
        "--from",
    )
    layers: str = setting("0,-1", "Layers of the target that a new drafter is made of.")
    neurons: int | None = setting(
        None, "MLP width of a new drafter; its hidden size unless given.", min=1
    )
    temperature: float = setting(1.0, "Temperature of both distributions in the loss.")
    own: float = setting(0.0, "Share of answers that the drafter writes itself (on-policy).")
    lora: int = setting(0, "Rank of LoRA, which is merged in the end; 0 for all weights.", min=0)
    alpha: float = setting(32.0, "Alpha of LoRA: its changes are scaled by alpha / rank.")
    rate: float | None = setting(
        None, "The learning rate; unless given 1e-3, with --from 2e-5, with --lora 2e-4."
    )


@app.command()
@with_flags(HeadFlags)
def eagle3(
    flags: HeadFlags,
    model: str = argument("MODEL", MODEL),
    layout: str = setting("speculators", "Layout of a new head: speculators or safeailab."),
) -> None:
    """Train an EAGLE-3 head, which drafts token by token from the target's hidden states."""
    _train("eagle3", model, flags, layout)


@app.command()
@with_flags(HeadFlags)
def block(flags: HeadFlags, model: str = argument("MODEL", MODEL)) -> None:
    """Train a P-EAGLE head, which drafts all tokens in one pass."""
    _train("peagle", model, flags)


@app.command()
@with_flags(HeadFlags)
def medusa(flags: HeadFlags, model: str = argument("MODEL", MODEL)) -> None:
    """Train Medusa heads, one for each token of a draft."""
    _train("medusa", model, flags)


def _train(kind: str, model: str, flags: HeadFlags, layout: str = "speculators") -> None:
    """Train a head, and print what it gives."""
    with torch_for("outrider train", extra="train"):
        from ..checkpoints.folders import find_folder
        from ..training.run_heads import RATE, HeadOptions, train_head
        from ..training.samples import DataFolder

    plan = flags.plan(RATE if flags.rate is None else flags.rate)
    options = HeadOptions(loss=flags.loss, depth=flags.depth, layout=layout)
    begin = None if flags.begin is None else find_folder(flags.begin)
    data = DataFolder.opened(flags.data)
    with ended_cleanly():
        trained = train_head(kind, find_folder(model), data, begin, flags.out, plan, options)
    flags.tell(trained)


@app.command()
@with_flags(DistillFlags)
def distill(flags: DistillFlags, model: str = argument("MODEL", MODEL)) -> None:
    """Train a small model with the target's tokenizer to draft for it."""
    with torch_for("outrider train", extra="train"):
        from ..checkpoints.folders import find_folder
        from ..training.run_distill import DistillOptions, train_drafter, usual_rate
        from ..training.samples import DataFolder

    begin = None if flags.begin is None else find_folder(flags.begin)
    plan = flags.plan(usual_rate(begin, flags.lora) if flags.rate is None else flags.rate)
    options = DistillOptions(
        loss=flags.loss, temperature=flags.temperature, own=flags.own, rank=flags.lora,
        alpha=flags.alpha, layers=numbers(flags.layers, int, "--layers"), neurons=flags.neurons,
    )  # fmt: skip
    data = DataFolder.opened(flags.data)
    with ended_cleanly():
        trained = train_drafter(find_folder(model), data, begin, flags.out, plan, options)
    flags.tell(trained)


@app.command()
def adapt(
    target: str | None = setting(None, MODEL, "--target"),
    drafter: str | None = setting(
        None,
        "The drafter to adapt, a head or a small model: a folder, .gguf file or hub name.",
        "--drafter",
    ),
    prompts: Path | None = setting(
        None, "Prompts of the domain, as in outrider train data.", "--prompts"
    ),
    out: Path = setting(..., OUT, "--out", "-o"),
    from_server: str | None = setting(
        None,
        "A server on this machine that was started with --record. Its target, drafter and "
        "recorded prompts are used unless others are given.",
        metavar="URL",
    ),
    load: bool = setting(
        False,
        "Load the result into that server, if the verdict is to deploy it.",
        "--load",
    ),
    api_key: ApiKey = None,
    max_tokens: int = setting(256, MAX_TOKENS, min=1),
    samples: int | None = setting(None, "Prompts to use; all unless given.", min=1),
    minutes: float | None = setting(None, "Minutes of all trainings, about, instead of epochs."),
    epochs: float = setting(3.0, EPOCHS),
    rate: float | None = setting(
        None, "The learning rate; unless given the best of three on a tenth of the data."
    ),
    skip_bad: bool = setting(False, SKIP_BAD, "--skip-bad"),
    states: bool = setting(False, STATES, "--states"),
    json_: AsJson = False,
) -> None:
    """Adapt a drafter to a domain, and say whether to deploy the result."""
    with torch_for("outrider train", extra="train"):
        from ..training.adapt import AdaptOptions
        from ..training.adapt import adapt as adapted
        from ..training.adapt_page import page
        from ..training.data import DataOptions
        from ..training.from_server import ask, check_loads, hand_over, keep_prompts
        from ..training.plan import Plan

    source = None if from_server is None else ask(from_server, api_key)
    if load:
        check_loads(source)
    if source is not None:
        target, drafter = target or source.target, drafter or source.drafter
        if prompts is None:
            prompts, skip_bad = keep_prompts(source, out), True  # clients send anything
    if target is None or drafter is None or prompts is None:
        raise ConfigError(
            "give --target, --drafter and --prompts, or --from-server of a server that drafts with "
            "a checkpoint."
        )
    options = AdaptOptions(
        data=DataOptions(
            prompts=prompts,
            max_tokens=max_tokens,
            samples=samples,
            skip_bad=skip_bad,
            states=states,
        ),
        plan=Plan(epochs=epochs, minutes=minutes),
        rate=rate,
    )
    with ended_cleanly(), telling("adapting") as told:
        report = adapted(target, drafter, out, options, told)
        write_json(report, str(out / "report.json"))
        (out / "report.html").write_text(page(report), encoding="utf-8", errors="replace")
    handed: str | None = None
    failed: OutriderError | None = None
    if source is not None and report["verdict"]["deploy"]:
        try:
            with telling("bringing it to the server"):
                handed = hand_over(source, Path(report["adapted"]), out.resolve().name, load)
        except OutriderError as error:
            failed = error  # told behind what there is
        report["server"] = handed
    if json_:
        write_json(report, "-")
    else:
        _tell_adapted(report, out, handed)
    if failed is not None:
        raise failed


def _tell_adapted(report: dict[str, Any], out: Path, handed: str | None) -> None:
    """Tell what an adaptation gave, and what was ``handed`` to a server."""
    from ..training.adapt_page import HEADS, rows

    grid = new_table(*HEADS[:2], right=HEADS[2:])
    for row in rows(report):
        grid.add_row(*(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row))
    console = report_console(on_stderr=False)
    console.print(grid)
    console.print(report["verdict"]["why"])
    console.print(f"{out / 'report.html'} shows it; the drafter is in {report['adapted']}.")
    if handed is not None:
        typer.echo(handed)  # whole, since it may hold a command


@app.command()
def layerskip(
    model: str = argument("MODEL", MODEL),
    data: Path = setting(..., DATA, "--data"),
    out: Path = setting(..., "The .json file to write.", "--out", "-o"),
    min_layers: int | None = setting(
        None, "Layers' worth of sublayers that run at least; 16 or half unless given."
    ),
    json_: AsJson = False,
) -> None:
    """Search for sublayers that the target can skip when it drafts for itself."""
    with torch_for("outrider train", extra="train"):
        from ..checkpoints.folders import find_folder
        from ..training.layerskip import search_skips
        from ..training.samples import DataFolder

    with ended_cleanly(), counted("scoring sets") as told:
        folder = DataFolder.opened(data)
        found = search_skips(find_folder(model), folder, out, min_layers, told)
    if json_:
        write_json({"file": str(out), **found._asdict()}, "-")
    else:
        screen(on_stderr=True).print(
            f"{out}: {len(found.sublayers)} sublayers run; {found.agreement:.0%} of their tokens "
            f"are the target's; decoding is expected to be {found.speed:.2f} times as fast as plain"
        )


HEAD = "The head: its folder."
OF = "Its target: a folder, .gguf file or hub name; the one in its config unless given."


@app.command()
def export(
    head: Path = argument("HEAD", HEAD),
    out: Path = argument("OUT", "The new folder."),
    layout: str = setting("speculators", "Layout of an EAGLE-3 head: speculators or safeailab."),
    target: str | None = setting(None, OF, "--target"),
    name: str | None = setting(
        None, "The target's name in the new config, such as its hub name.", "--name"
    ),
) -> None:
    """Write a head for other engines and libraries, such as vLLM."""
    with ended_cleanly(), lines("exporting"):
        from ..checkpoints.checkpoint import open_checkpoint
        from ..checkpoints.folders import find_folder
        from ..checkpoints.head_export import export_head, needs_target
        from ..checkpoints.heads import read_head
        from ..drafters.heads import verifier_of

        own = read_head(head)
        if own is None:
            raise ConfigError(f"{head} is not a head; give one that outrider train wrote.")
        opened = None
        if needs_target(own, layout):
            opened = open_checkpoint(find_folder(target) if target else verifier_of(own))
        count = export_head(own, out, layout, opened, name or target)
    screen(on_stderr=True).print(f"{out}: {own.kind} of {count} tensors")


@app.command()
def measure(
    drafter: Path = argument("DRAFTER", "The drafter: the folder of a head or of a small model."),
    prompts: list[str] = setting(
        ...,
        "Prompts of a use: chat, code, agents or 'long context'. May be given several times.",
        metavar="USE=FILE",
    ),
    target: str | None = setting(None, f"{OF} A small model names none.", "--target"),
    max_tokens: int = setting(128, MAX_TOKENS, min=2),
    json_: AsJson = False,
) -> None:
    """Measure a drafter as served; write acceptance and the best draft lengths into it."""
    with torch_for("outrider train", extra="train"):
        from ..checkpoints.folders import find_folder
        from ..training.card import table
        from ..training.measure import measure as measured

    files: dict[str, Path] = {}
    for each in prompts:
        use, _, file = each.partition("=")
        if not file:
            raise typer.BadParameter(f"give {each} as USE=FILE, for instance chat=chat.jsonl.")
        files[use] = Path(file)
    with ended_cleanly(), telling("measuring") as told:
        extras = measured(drafter, find_folder(target) if target else None, files, max_tokens, told)
    if json_:
        write_json(extras.to_json(), "-")
    else:
        typer.echo(table(extras))
