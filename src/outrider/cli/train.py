"""``outrider train``: data from the target itself, and trainers of drafters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..base.extras import torch_for
from ..errors import ConfigError
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
    from ..training.loop import Plan
    from ..training.run_heads import Trained

app = App(no_args_is_help=True)
MODEL = "The target: a checkpoint's folder, .gguf file or hub name."
OUT = "The folder to write; one that was begun goes on."


@app.callback()
def train() -> None:
    """Train drafters on what the target itself says."""


@app.command()
def data(
    model: str = argument("MODEL", MODEL),
    prompts: Path | None = setting(
        None, "A .jsonl file, or a folder of them; the target writes prompts itself unless given."
    ),
    out: Path = setting(..., OUT, "--out", "-o"),
    temperature: str = setting("0,0.8", "Temperatures, with commas: prompts take turns."),
    max_tokens: int = setting(256, "Tokens of an answer at most.", min=1),
    context: int | None = setting(None, "Tokens of a sample at most; 1024 unless given.", min=16),
    seed: int = setting(0, "All seeds follow from it.", min=0, max=2**20),
    samples: int | None = setting(None, "Prompts to answer; all unless given.", min=1),
    skip_bad: bool = setting(False, "Leave out prompts that are bad.", "--skip-bad"),
    json_: AsJson = False,
) -> None:
    """Have the target answer prompts, speculatively and in batches."""
    with torch_for("outrider train"):
        from ..training.data import DataOptions, make_data

    options = DataOptions(
        prompts=prompts, temperatures=numbers(temperature, float, "--temperature"),
        max_tokens=max_tokens, context=context, seed=seed, samples=samples, skip_bad=skip_bad,
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

    data: Path = setting(..., "A folder that outrider train data wrote.")
    out: Path = setting(..., OUT, "--out", "-o")
    loss: str = setting("forward-kl", "forward-kl, reverse-kl, tvd, hard, coupled or hybrid.")
    epochs: float = setting(3.0, "Times that all samples are seen.")
    steps: int | None = setting(None, "Steps instead of epochs.", min=1)
    minutes: float | None = setting(None, "About so many minutes instead of epochs.")
    batch: int = setting(2048, "Tokens that a step learns from, on each device.", min=1)
    accumulate: int = setting(1, "Batches that a step adds up.", min=1)
    seed: int = setting(0, "The order of samples, how what is new begins, and draws.", min=0)
    json_: AsJson = False

    def plan(self, rate: float) -> Plan:
        """Return how to train."""
        from ..training.loop import Plan

        if self.steps is not None and self.minutes is not None:
            raise ConfigError("give --steps or --minutes, not both.")
        return Plan(
            epochs=self.epochs, steps=self.steps, minutes=self.minutes, rate=rate,
            batch=self.batch, accumulate=self.accumulate, seed=self.seed,
        )  # fmt: skip

    def tell(self, trained: Trained) -> None:
        """Tell what is accepted of what was trained; of several processes the first one does."""
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
                f"T = {each.temperature:g}: {each.acceptance_length:.2f} tokens a step, "
                f"{each.speedup:.2f} times as fast as plain decoding, on held-out prompts"
            )
        console.print(f"the drafter is in {self.out}")


@dataclass(frozen=True)
class HeadFlags(TrainFlags):
    """The flags of the commands that train heads."""

    begin: Path | None = setting(None, "A head to go on from; anew unless given.", "--from")
    depth: int = setting(4, "Tokens of a draft in training.", min=1, max=16)
    batch: int = setting(512, "Tokens that a step learns from, on each device.", min=1)
    rate: float | None = setting(None, "The learning rate; 2e-3 unless given.")


@dataclass(frozen=True)
class DistillFlags(TrainFlags):
    """The flags of the command that trains small drafters."""

    begin: str | None = setting(
        None, "A drafter to go on from: a folder, .gguf file or hub name; anew unless given.",
        "--from",
    )  # fmt: skip
    layers: str = setting("0,-1", "Layers of the target that a new drafter begins with.")
    neurons: int | None = setting(
        None, "Neurons that its MLPs keep; as many as it is wide unless given.", min=1
    )
    temperature: float = setting(1.0, "Temperature of both distributions.")
    own: float = setting(0.0, "Share of answers that the drafter writes itself.")
    lora: int = setting(0, "Rank of changes by LoRA, which are merged; 0 trains it whole.", min=0)
    alpha: float = setting(32.0, "What LoRA's changes weigh, times the rank.")
    rate: float | None = setting(
        None, "The learning rate; 2e-5 unless given, 2e-4 by LoRA, 1e-3 for a new drafter."
    )


@app.command()
@with_flags(HeadFlags)
def eagle3(
    flags: HeadFlags,
    model: str = argument("MODEL", MODEL),
    layout: str = setting("speculators", "Of a new head: speculators or safeailab."),
) -> None:
    """Train an EAGLE-3 head on a target's hidden states, unrolled as it drafts."""
    _train("eagle3", model, flags, layout)


@app.command()
@with_flags(HeadFlags)
def block(flags: HeadFlags, model: str = argument("MODEL", MODEL)) -> None:
    """Train a P-EAGLE head, which drafts a block of tokens in one pass."""
    _train("peagle", model, flags)


@app.command()
@with_flags(HeadFlags)
def medusa(flags: HeadFlags, model: str = argument("MODEL", MODEL)) -> None:
    """Train Medusa heads, one for each token of a draft, on a target's last hidden state."""
    _train("medusa", model, flags)


def _train(kind: str, model: str, flags: HeadFlags, layout: str = "speculators") -> None:
    """Train a head, and tell what it would be accepted."""
    with torch_for("outrider train"):
        from ..checkpoints.families import find_folder
        from ..training.run_heads import RATE, HeadOptions, train_head
        from ..training.samples import DataFolder

    plan = flags.plan(RATE if flags.rate is None else flags.rate)
    options = HeadOptions(loss=flags.loss, depth=flags.depth, layout=layout)
    data, out = DataFolder.opened(flags.data), flags.out
    with ended_cleanly():
        trained = train_head(kind, find_folder(model), data, flags.begin, out, plan, options)
    flags.tell(trained)


@app.command()
@with_flags(DistillFlags)
def distill(flags: DistillFlags, model: str = argument("MODEL", MODEL)) -> None:
    """Train a small drafter with the target's tokenizer on what the target says."""
    with torch_for("outrider train"):
        from ..checkpoints.families import find_folder
        from ..training.run_distill import DistillOptions, train_drafter, usual_rate
        from ..training.samples import DataFolder

    begin = None if flags.begin is None else find_folder(flags.begin)
    plan = flags.plan(usual_rate(begin, flags.lora) if flags.rate is None else flags.rate)
    options = DistillOptions(
        loss=flags.loss, temperature=flags.temperature, own=flags.own, rank=flags.lora,
        alpha=flags.alpha, layers=numbers(flags.layers, int, "--layers"), neurons=flags.neurons,
    )  # fmt: skip
    data, out = DataFolder.opened(flags.data), flags.out
    with ended_cleanly():
        trained = train_drafter(find_folder(model), data, begin, out, plan, options)
    flags.tell(trained)


@app.command()
def adapt(
    target: str | None = setting(None, MODEL, "--target"),
    drafter: str | None = setting(
        None, "The head or small model to begin with: its folder or hub name.", "--drafter"
    ),
    prompts: Path | None = setting(
        None, "Prompts of the domain: a .jsonl file, or a folder of them.", "--prompts"
    ),
    out: Path = setting(..., OUT, "--out", "-o"),
    from_server: str | None = setting(
        None,
        "An outrider serve --record on this machine, whose target, drafter and recorded prompts "
        "are taken unless others are given.",
        metavar="URL",
    ),
    load: bool = setting(
        False,
        "Have that server draft with the result at once, if the verdict is to deploy it.",
        "--load",
    ),
    api_key: ApiKey = None,
    max_tokens: int = setting(256, "Tokens of an answer at most.", min=1),
    samples: int | None = setting(None, "Prompts to answer; all unless given.", min=1),
    minutes: float | None = setting(None, "About so many minutes of training, all together."),
    epochs: float = setting(3.0, "Times that all samples are seen."),
    rate: float | None = setting(
        None, "The learning rate; the best of three on a part of the data unless given."
    ),
    skip_bad: bool = setting(False, "Leave out prompts that are bad.", "--skip-bad"),
    json_: AsJson = False,
) -> None:
    """Adapt a drafter to a domain; say what it gains, what it forgets, and whether to deploy it."""
    with torch_for("outrider train"):
        from ..training.adapt import AdaptOptions
        from ..training.adapt import adapt as adapted
        from ..training.adapt_page import HEADS, page, rows
        from ..training.data import DataOptions
        from ..training.from_server import ask, check_loads, hand_over, keep_prompts
        from ..training.loop import Plan

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
            prompts=prompts, max_tokens=max_tokens, samples=samples, skip_bad=skip_bad
        ),
        plan=Plan(epochs=epochs, minutes=minutes),
        rate=rate,
    )
    with ended_cleanly(), telling("adapting") as told:
        report = adapted(target, drafter, out, options, told)
    write_json(report, str(out / "report.json"))
    (out / "report.html").write_text(page(report), encoding="utf-8")
    handed = None
    if source is not None and report["verdict"]["deploy"]:
        with telling("bringing it to the server"):
            handed = hand_over(source, Path(report["adapted"]), out.resolve().name, load)
        report["server"] = handed
    if json_:
        write_json(report, "-")
        return
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
    data: Path = setting(..., "A folder that outrider train data wrote.", "--data"),
    out: Path = setting(..., "The .json file to write.", "--out", "-o"),
    min_layers: int | None = setting(None, "Layers' worth of sublayers that run at least."),
    json_: AsJson = False,
) -> None:
    """Search for the sublayers that the target can do without where it drafts for itself."""
    with torch_for("outrider train"):
        from ..checkpoints.families import find_folder
        from ..training.layerskip import search_skips
        from ..training.samples import DataFolder

    with ended_cleanly(), counted("scoring sets") as told:
        folder = DataFolder.opened(data)
        found = search_skips(find_folder(model), folder, out, min_layers, told)
    if json_:
        write_json({"file": str(out), **found._asdict()}, "-")
    else:
        screen(on_stderr=True).print(
            f"{out}: {len(found.sublayers)} sublayers run, say the same in "
            f"{found.agreement:.0%} of places, and are expected to decode {found.speed:.2f} times "
            "as fast as none"
        )


HEAD = "The head: its folder."
OF = "Its target: a folder, .gguf file or hub name; the one that it names unless given."


@app.command()
def export(
    head: Path = argument("HEAD", HEAD),
    out: Path = argument("OUT", "The new folder."),
    layout: str = setting("speculators", "Of an EAGLE-3 head: speculators or safeailab."),
    target: str | None = setting(None, OF, "--target"),
    name: str | None = setting(None, "What to call the target, such as its hub name.", "--name"),
) -> None:
    """Write a head as other engines and libraries read it."""
    with ended_cleanly(), lines("exporting"):
        from ..checkpoints.checkpoint import open_checkpoint
        from ..checkpoints.families import find_folder
        from ..checkpoints.head_export import export_head, needs_target
        from ..checkpoints.heads import read_head
        from ..drafters.heads import verifier_of

        own = read_head(head)
        if own is None:
            raise ConfigError(f"{head} is no head; give one that outrider train wrote.")
        opened = None
        if needs_target(own, layout):
            opened = open_checkpoint(find_folder(target) if target else verifier_of(own))
        count = export_head(own, out, layout, opened, name or target)
    screen(on_stderr=True).print(f"{out}: {own.kind} of {count} tensors")


@app.command()
def measure(
    head: Path = argument("HEAD", HEAD),
    prompts: list[str] = setting(
        ...,
        "Prompts of a use: chat, code, agents or long context. Give it more than once.",
        metavar="USE=FILE",
    ),
    target: str | None = setting(None, OF, "--target"),
    max_tokens: int = setting(128, "Tokens of an output at most.", min=1),
    json_: AsJson = False,
) -> None:
    """Measure a head as it is served; write into it what is accepted, and lengths to draft."""
    with torch_for("outrider train"):
        from ..checkpoints.families import find_folder
        from ..training.card import table
        from ..training.measure import measure as measured

    files: dict[str, Path] = {}
    for each in prompts:
        use, _, file = each.partition("=")
        if not file:
            raise typer.BadParameter(f"give {each} as USE=FILE, for instance chat=chat.jsonl.")
        files[use] = Path(file)
    with ended_cleanly(), telling("measuring") as told:
        extras = measured(head, find_folder(target) if target else None, files, max_tokens, told)
    if json_:
        write_json(extras.to_json(), "-")
    else:
        typer.echo(table(extras))
