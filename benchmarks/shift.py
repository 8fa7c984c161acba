"""A fine-tuned target, its stock drafter, and that drafter adapted to it.

The target is trained on C++, the headers that PyTorch is installed with (BSD licence). Its drafter
knows nothing of that and loses acceptance on prompts of the domain. ``outrider train adapt`` wins
it back. With ``--steps 0`` the target stays as it is, and its drafter learns the domain. Figures
are of prompts from headers that nothing was trained on.
"""

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any
from zlib import crc32

import numpy as np
import torch
import torch.nn.functional as F
import typer
from numpy.typing import NDArray
from tqdm import tqdm

from outrider.bench.machine import machine
from outrider.checkpoints.files import Files
from outrider.checkpoints.folders import find_folder
from outrider.checkpoints.tokenizers import read_codec
from outrider.training.adapt import MEASURED_TOKENS, AdaptOptions, adapt
from outrider.training.adapt_page import best_of
from outrider.training.data import DataOptions
from outrider.training.drafter_files import read_drafter, save_drafter
from outrider.training.optimisers import Optimisers, trained
from outrider.training.plan import Plan
from outrider.training.samples import DataFolder
from outrider.training.served import Serving, held_out_prompts
from outrider.training.targets import open_target

from .common import POCKET, Length, Model, Seed, table

HEADERS = Path(torch.__file__).parent / "include"
HELD_OUT = 8
"""One header in so many gives prompts."""
WINDOW = 256
BATCH = 8
PROMPT_CHARACTERS = 200
COLUMNS = ("T", "before", "adapted", "stock target", "lost", "won back")
"""Tokens a step before and after, on the stock target, and shares; the last three if fine-tuned."""


def headers(wanted: bool) -> Iterator[str]:
    """Yield headers, those that give prompts or those that the target is trained on."""
    for file in sorted(HEADERS.rglob("*.h")):
        name = file.relative_to(HEADERS).as_posix()
        if (crc32(name.encode()) % HELD_OUT == 0) == wanted:
            yield file.read_text(encoding="utf-8", errors="ignore")


def windows(target: Path, count: int, seed: int) -> NDArray[np.int64]:
    """Return ``count`` pieces of the headers that a target is trained on, ids [count, WINDOW]."""
    codec, random = read_codec(target), np.random.default_rng(seed)
    texts = [*headers(False)]
    ids: list[int] = []
    for which in random.permutation(len(texts)):
        ids += codec.encode(texts[which])
        if len(ids) >= count * WINDOW:
            break
    found = np.array(ids[: len(ids) // WINDOW * WINDOW]).reshape(-1, WINDOW)[:count]
    return random.permutation(found)


def fine_tune(target: Path, out: Path, steps: int, rate: float, seed: int) -> None:
    """Train a target on the headers and write it to ``out``."""
    files = Files(target)
    small = read_drafter(target, files)
    model: Any = small.module
    plan = Plan(steps=steps, rate=rate)
    optimisers = Optimisers(model, plan)
    cut = torch.from_numpy(windows(target, steps * BATCH, seed))
    for step, batch in enumerate(tqdm(cut.split(BATCH), "fine-tuning", leave=False, disable=None)):
        logits = model(batch, use_cache=False).logits[:, :-1]
        F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), plan.clip)
        optimisers.step(rate * plan.share(step))
        model.zero_grad()
    save_drafter(small.config, trained(model).items(), files, out)


def write_prompts(file: Path, count: int, seed: int) -> None:
    """Write parts of held-out headers, which begin with a line."""
    random = np.random.default_rng(seed)
    texts = [text for text in headers(True) if len(text) > 2000]
    with file.open("w", encoding="utf-8") as opened:
        for _ in range(count):
            text = texts[random.integers(len(texts))]
            begin = text.find("\n", int(random.integers(len(text) - 1000))) + 1
            prompt = text[begin : begin + PROMPT_CHARACTERS]
            opened.write(json.dumps({"prompt": prompt}) + "\n")


def acceptance(target: Path, drafter: Path, data: DataFolder, length: int) -> list[float]:
    """Return tokens a step on held-out prompts of ``data``, at temperatures 0 and 1."""
    context = data.about.context
    prompts = held_out_prompts(data.read(), context - MEASURED_TOKENS)
    model = open_target(target, data).model
    serving = Serving(target, model, prompts, MEASURED_TOKENS, context)
    found = serving.measure(drafter, length, (0.0, 1.0), rounds=1)
    return [each.acceptance_length for each in found]


def shown(row: dict[str, float]) -> Sequence[str]:
    """Return the cells of a row of the table, see ``COLUMNS``."""
    cells = [f"{row['temperature']:g}", f"{row['before']:.2f}", f"{row['adapted']:.2f}"]
    if "stock" in row:
        cells += [f"{row['stock']:.2f}", f"{row['lost']:.0%}", f"{row['won_back']:.0%}"]
    return cells


def main(
    work: Annotated[Path, typer.Argument(help="The folder for models and data; goes on there.")],
    model: Model = POCKET,
    drafter: Annotated[str | None, typer.Option(help="The stock drafter; the bundled one.")] = None,
    steps: Annotated[int, typer.Option(help="Steps of 2,048 tokens of fine-tuning.", min=0)] = 120,
    tuning_rate: Annotated[float, typer.Option(help="The learning rate of fine-tuning.")] = 1e-3,
    prompts: Annotated[int, typer.Option(help="Prompts of the domain.", min=200)] = 1000,
    minutes: Annotated[float, typer.Option(help="Minutes of training in adapt.")] = 16.0,
    num_speculative_tokens: Length = 4,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="A report as JSON.")] = None,
) -> None:
    """Fine-tune a target, adapt its drafter to it, and say how much of the loss is won back."""
    stock = find_folder(model)
    begin = find_folder(drafter) if drafter else stock / "drafter"
    tuned = work / f"tuned-{steps}-{tuning_rate:g}-{seed}" if steps else stock
    file = work / f"prompts-{prompts}-{seed}.jsonl"
    work.mkdir(parents=True, exist_ok=True)
    if steps and not (tuned / "model.safetensors").exists():
        fine_tune(stock, tuned, steps, tuning_rate, seed)
    if not file.exists():
        write_prompts(file, prompts, seed)
    clock = time.monotonic()
    options = AdaptOptions(
        data=DataOptions(prompts=file, max_tokens=128, seed=seed), plan=Plan(minutes=minutes),
        length=num_speculative_tokens,
    )  # fmt: skip
    report = adapt(str(tuned), str(begin), work / "adapted", options, print)
    taken = (time.monotonic() - clock) / 60
    after = best_of(report)
    rows = [
        {"temperature": old["temperature"], "before": old["acceptance_length"],
         "adapted": new["acceptance_length"]}
        for old, new in zip(report["points"][0]["domain"], after["domain"], strict=True)
    ]  # fmt: skip
    if steps:
        data = DataFolder.opened(work / "adapted" / "data")
        for row, length in zip(
            rows, acceptance(stock, begin, data, num_speculative_tokens), strict=True
        ):
            lost = length - row["before"]
            row |= {
                "stock": length, "lost": lost / length,
                "won_back": (row["adapted"] - row["before"]) / lost,
            }  # fmt: skip
    print("\n".join(table(COLUMNS if steps else COLUMNS[:3], [shown(row) for row in rows])))
    kept, here = after["kept"]["gain"], machine()
    print(
        f"\nGeneral prompts: {kept:+.1%}. Learning rate {after['rate']:g}, "
        f"{after['share']:.0%} of the data, {taken:.0f} minutes, data included; {here['cpu']}, "
        f"{here['date'][:10]}."
    )
    if out is not None:
        told = {"rows": rows, "minutes": taken, "machine": here, "report": report}
        out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
