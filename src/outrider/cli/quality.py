"""``outrider bench quality``: what quantised weights cost in quality."""

from pathlib import Path
from typing import Any

from rich.table import Table

from ..bench.intervals import shown
from .common import (
    AsJson,
    Model,
    Out,
    lines,
    model_folder,
    new_table,
    read_text,
    report_console,
    status,
    write_report,
)
from .flags import setting

DEFINITIONS = (
    "bits: of a weight as stored, scales and what is not quantised too · loss: perplexity over the "
    "reference's, less 1 · agreement: positions with the same most likely next token · KL: "
    "divergence from the reference's distribution, nats · in brackets 95 % intervals over windows"
)


def table(report: dict[str, Any]) -> Table:
    """Return the report as a table."""
    title = (
        f"{report['model']} · {report['dtype']}: {report['bits_per_weight']:.2f} bits, perplexity "
        f"{report['perplexity']:.4f} · {report['windows']} windows of {report['window']} tokens"
    )
    figures = ("bits", "perplexity", "loss", "", "agreement", "", "KL", "")
    grid = new_table("quantization", right=figures, title=title, caption=DEFINITIONS)
    for run in report["runs"]:
        grid.add_row(
            run["quantization"],
            f"{run['bits_per_weight']:.3f}",
            f"{run['perplexity']:.4f}",
            f"{run['perplexity_loss']:.2%}",
            shown([100 * bound for bound in run["perplexity_loss_interval"]], ".2f"),
            f"{run['agreement']:.2%}",
            shown([100 * bound for bound in run["agreement_interval"]], ".2f"),
            f"{run['divergence']:.5f}",
            shown(run["divergence_interval"], ".5f"),
        )
    return grid


def quality(
    model: Model = None,
    quantization: str = setting(
        "int8,int4",
        "What to measure, comma-separated: recipes as generate takes them, or quantised "
        "checkpoints with the same tokenizer.",
        metavar="RECIPES",
    ),
    text: list[Path] | None = setting(
        None,
        "Text to read; may be given again. Unless given, modules of Python's standard "
        "library that the pocket pair was not trained on.",
        exists=True,
        dir_okay=False,
        metavar="FILE",
    ),
    windows: int = setting(64, "Windows of 512 tokens to read, spread over the text.", min=8),
    dtype: str = setting(
        "bfloat16", "auto (the checkpoint's), float32, bfloat16 or float16 (slower)."
    ),
    kv_cache_dtype: str = setting("auto", "Keys and values of what is measured: auto or int8."),
    json_: AsJson = False,
    out: Out = None,
) -> None:
    """Measure perplexity, agreement and bits of quantised weights against the model's own."""
    from .. import pocket

    texts = [read_text(file, f"--text {file}") for file in text or ()] or pocket.held_out()
    with status("loading the models"):
        from ..bench.quality import quality as measure
    recipes = [recipe for recipe in quantization.split(",") if recipe]
    with lines("measuring quality"):
        report = measure(model_folder(model), texts, recipes, windows, dtype, kv_cache_dtype)
    report["model"] = "pocket" if model is None else model
    write_report(report, json_, out)
    report_console(on_stderr=json_).print(table(report))
