"""``outrider tune``: the fastest drafter and draft length for a model, a machine and a workload."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from ..bench.intervals import shown
from ..server.options import toml
from .bench import named_workload
from .common import (
    AsJson,
    Model,
    bars,
    counted,
    model_folder,
    new_table,
    numbers,
    png,
    report_console,
    shapes,
    status,
    writable,
    write_json,
)
from .flags import engine_options, setting, with_flags

if TYPE_CHECKING:
    from ..bench.tuned import TuningResult

SHOWN = 8
"""Settings of a batch size that the table has."""
DEFINITIONS = (
    "tokens/s: decode speed, (N-1)/(T(N)-T(1)), geometric mean over rounds; in italics what two "
    "runs of the drafter promise · speedup: to plain decoding in the same round, median and 95 % "
    "interval · ms/token: what a sequence waits for a token · length: 1 + accepted / drafts · "
    "survival: share of drafts accepted up to each position"
)


def table(cell: dict[str, Any]) -> Table:
    """Return the settings of one batch size, raced ones first, the fastest first."""
    loss = f"no other raced setting is faster by more than {cell['loss_at_most']:.1%}"
    grid = new_table(
        "setting", "verdict", "survival",
        right=("tokens/s", "speedup", "", "ms/token", "length", "rounds"),
        title=f"batch size {cell['batch_size']}: {cell['best']} ({loss})",
    )  # fmt: skip
    for row in cell["settings"][:SHOWN]:
        raced, length = row["rounds"], row["acceptance_length"]
        nodes = f", {row['max_draft_nodes']} nodes" if row["max_draft_nodes"] else ""
        k, speed = row["num_speculative_tokens"], row["tokens_per_second" if raced else "promised"]
        grid.add_row(
            f"{row['drafter']} K={k}{nodes}" if k else "plain",
            row["verdict"],
            bars(row["acceptance_by_position"]),
            Text(f"{speed:.0f}", "" if raced else "italic"),
            f"{row['speedup']:.2f}x" if raced else "",
            shown(row["speedup_interval"], ".2f"),
            f"{row['latency_per_token_ms']:.2f}" if raced else "",
            f"{length:.2f}" if length else "",
            str(raced or ""),
            style="bold green" if row["verdict"] == "best" else None,
        )
    return grid


def config(tuning: TuningResult) -> str:
    """Return a file that ``outrider serve --config`` and ``outrider ops deploy render`` read."""
    machine, workload = tuning.setting["machine"], tuning.setting["workload"]
    lines = [f"# outrider tune, {machine['date']}, {machine['cpu']}, workload {workload}"]
    for cell in tuning.cells:
        lines.append(
            f"# batch size {cell.batch_size}: {cell.best} is best, no other raced setting is "
            f"faster by more than {cell.race.loss:.1%}; what stands here has "
            f"{tuning.kept[cell.batch_size]:.1%} of its speed"
        )
    lines += _pairs({"model": tuning.model, **tuning.serve})
    lines += ["", "# What outrider ops deploy render reads."]
    for name, values in tuning.deploy.items():
        lines += [f"[deploy.{name}]", *_pairs(values)]
    return "\n".join([*lines, ""])


def _pairs(values: dict[str, Any]) -> list[str]:
    return [f"{name} = {toml(value)}" for name, value in values.items()]


def others(report: dict[str, Any]) -> list[str]:
    """Return what other engines should have, a line each."""
    method = report["deploy"]["drafter"]["method"]
    if method == "none":
        return ["Other engines: no speculation."]
    schedule, eagle = report["tensorrt_llm"], report["sglang"]
    return [
        f"Other engines: {method}",
        f"vLLM: num_speculative_tokens_per_batch_size {report['vllm']}",
        f"TensorRT-LLM: draft_len_schedule {schedule}" if schedule is not None
        else "TensorRT-LLM: no schedule, for it drafts longest for the smallest batches",
        f"SGLang: {json.dumps(eagle)}" if eagle is not None
        else "SGLang: no schedule, for its tiers are those of EAGLE heads",
    ]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TuneFlags:
    """The options of ``outrider tune``."""

    drafter: str = setting(
        "auto", "auto, or auto+ and drafters by name or folder: all are compared."
    )
    num_speculative_tokens: str = setting(
        "1,2,3,4,5,6,7,8,9,10", "Draft lengths K, comma-separated.", metavar="INTS"
    )
    batch_size: str = setting(
        "1,4,16", "How many sequences run together, comma-separated.", metavar="INTS"
    )
    prompts: str = setting("code", "code, edit, prose, json, chat, or a file.", metavar="NAME|FILE")
    num_prompts: int | None = setting(
        None, "Prompts of a run; 8 unless given, more for larger batches."
    )
    max_tokens: int = setting(64, "Output tokens of each prompt.")
    temperature: float = setting(0.0, "Sampling temperature.")
    max_tpot: float | None = setting(
        None, "Seconds that a sequence may wait for a token; bounds max_num_seqs."
    )
    out: list[str] | None = setting(
        None,
        "FILE.toml gets what serve --config and ops deploy render read, FILE.json the report; may "
        "be given twice.",
        "--out",
        "-o",
        metavar="FILE",
        callback=writable,
    )
    json_: AsJson = False
    plot: str | None = setting(
        None,
        "Draw speed by K, and throughput against latency, as PNG; needs outrider[plot].",
        metavar="FILE.png",
        callback=png,
    )
    trees: str = setting("", "Trees as NODES:DEPTH, comma-separated; each loads an engine more.")
    rounds: int = setting(12, "Most rounds of a race.", min=3)


@with_flags(
    TuneFlags,
    engine_options("dtype", "quantization", "drafter_quantization", "drafter_window", "threads"),
)
def tune(flags: TuneFlags, model: Model = None, **engine: Any) -> None:
    """Find the drafter, the draft length and the batch size that are fastest here."""
    with status("loading the models"):
        from ..bench import tune as tuning

        if flags.plot:
            from ..bench.plot import draw_tuning
        items = named_workload(flags.prompts)
    with counted("loading the models") as told:
        options = {name: value for name, value in engine.items() if value is not None}
        tuned = tuning.tune(
            model_folder(model), items, drafter=flags.drafter,
            lengths=numbers(flags.num_speculative_tokens, int, "--num-speculative-tokens"),
            trees=shapes(flags.trees) if flags.trees else (), num_prompts=flags.num_prompts,
            batch_sizes=numbers(flags.batch_size, int, "--batch-size"), max_tokens=flags.max_tokens,
            temperature=flags.temperature, max_tpot=flags.max_tpot, rounds=flags.rounds,
            told=lambda size, done, total: told(done, total, f"batch size {size}"),
            **options,
        )  # fmt: skip
    report = tuned.report()
    write_json(report, "-" if flags.json_ else None)
    for file in map(Path, flags.out or ()):
        if file.suffix == ".json":
            write_json(report, str(file))
        else:
            file.write_text(config(tuned), encoding="utf-8")
    if flags.plot:
        draw_tuning(report, Path(flags.plot))
    console = report_console(flags.json_)
    for cell in report["batch_sizes"]:
        console.print(table(cell))
    console.print(DEFINITIONS, style="dim")
    console.print("\nThroughput against latency, of what was raced, none beaten in both:")
    for point in report["pareto"]:
        console.print(
            f"  {point['tokens_per_second']:.0f} tokens/s at {point['latency_per_token_ms']:.2f} "
            f"ms/token: batch size {point['batch_size']}, {point['setting']}"
        )
    console.print()
    console.print(config(tuned), soft_wrap=True)
    for line in others(report):
        console.print(line, soft_wrap=True)
