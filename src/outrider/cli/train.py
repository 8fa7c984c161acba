"""``outrider train``: data from the target itself, and trainers of drafters."""

from __future__ import annotations

from pathlib import Path

from ..base.extras import torch_for
from .common import AsJson, counted, ended_cleanly, numbers, screen, write_json
from .flags import argument, setting
from .spelling import App

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
        None, "A .jsonl file of prompts or messages; the target writes them unless given."
    ),
    out: Path = setting(..., OUT, "--out", "-o"),
    temperature: str = setting("0,0.8", "Temperatures, with commas: prompts take turns."),
    max_tokens: int = setting(256, "Tokens of an answer at most.", min=1),
    context: int = setting(1024, "Tokens of a sample at most.", min=16),
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


@app.command()
def eagle3(
    model: str = argument("MODEL", MODEL),
    data: Path = setting(..., "A folder that outrider train data wrote.", "--data"),
    out: Path = setting(..., OUT, "--out", "-o"),
    begin: Path | None = setting(None, "A head to go on from; anew unless given.", "--from"),
    loss: str = setting("forward-kl", "forward-kl, reverse-kl, tvd, hard, coupled or hybrid."),
    depth: int = setting(5, "Tokens of a draft in training.", min=1, max=16),
    epochs: float = setting(3.0, "Times that all samples are seen."),
    steps: int | None = setting(None, "Steps instead of epochs.", min=1),
    minutes: float | None = setting(None, "About so many minutes instead of epochs."),
    rate: float = setting(1e-3, "The learning rate."),
    batch: int = setting(2048, "Tokens that a step learns from, on each device.", min=1),
    seed: int = setting(0, "The order of samples, and how a new head begins.", min=0),
    json_: AsJson = False,
) -> None:
    """Train an EAGLE-3 head on a target's hidden states, unrolled as it drafts."""
    with torch_for("outrider train"):
        from ..checkpoints.families import find_folder
        from ..training.loop import Plan
        from ..training.run_heads import HeadOptions, train_head
        from ..training.samples import DataFolder

    plan = Plan(epochs=epochs, steps=steps, minutes=minutes, rate=rate, batch=batch, seed=seed)
    options = HeadOptions(loss=loss, depth=depth)
    with ended_cleanly():
        judged = train_head(
            "eagle3", find_folder(model), DataFolder.opened(data), begin, out, plan, options
        )
    report = {"folder": str(out), **judged._asdict()}
    if json_:
        write_json(report, "-")
    else:
        screen(on_stderr=True).print(
            f"{out}: {judged.acceptance_length:.2f} tokens a step at temperature 0, "
            f"{judged.coupled_length:.2f} at 1, on held-out samples"
        )
