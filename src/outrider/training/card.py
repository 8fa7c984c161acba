"""The model card of a trained drafter: its target, its training data, and its results."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .. import __version__
from ..base.kept import part_of, read_kept
from ..base.outside.text import printable
from ..bench.machine import machine
from ..checkpoints.checkpoint import open_checkpoint
from ..checkpoints.extras import Extras
from ..checkpoints.files import Files
from ..checkpoints.folders import name_of
from ..checkpoints.heads import EAGLE3, MEDUSA, Head, read_head
from .curves import CURVES, last_step
from .loop import RUN, Judged
from .samples import DataFolder

CARD = "README.md"
SMALL = "draft-model"
"""The kind of a small model, as a tag."""
BEGIN, END = "<!-- measured -->", "<!-- /measured -->"
UNMEASURED = (
    "Nothing yet. `outrider train measure` measures it as it is served, and writes the result here."
)
NO_LICENCE = """\
**Licence: not chosen yet.** Whoever publishes this drafter names one here. It was trained on the
target's answers, so the licences of the target and of the prompts count."""
TEXT = """---
library_name: outrider{base}
tags: [speculative-decoding, {kind}]
---
# {what} for {target}

A drafter for speculative decoding: {size}.
It proposes tokens, and the target verifies them, so the target's output stays the same.

```
{commands}
```

{licence}

## Training

| | |
| -- | -- |
| target | {target} |
| started from | {begin} |
| data | {samples:,} samples of the target's own answers, which are {said:,} tokens |
| prompts | {prompts:,}, SHA-256 `{digest}`, answered at temperatures {heats} |
| training | {steps:,} steps of {batch:,} tokens, rate {rate:g}, loss {loss}, depth {depth}{more} |
| held-out samples | forecast acceptance length {greedy:.2f} at temperature 0, {coupled:.2f} at 1 |
| made with | outrider {outrider}, torch {torch}, {cpu}, {date} |

## Measured

Acceptance length is 1 + accepted / drafts, the tokens that a verify step of the target gives.

{begin_mark}
{unmeasured}
{end_mark}
"""


SERVE = "outrider serve TARGET --drafter THIS_FOLDER"
EXPORT = """\
outrider train export THIS_FOLDER NEW_FOLDER --name TARGET    # for vLLM and speculators"""


def write_card(folder: Path, work: Path, data: DataFolder, judged: Judged) -> None:
    """Write the card of the drafter in a folder; ``work`` is the folder of its training.

    A card whose licence line a person has changed is kept.
    """
    file = folder / CARD
    if file.exists() and "Licence: not chosen yet" not in _read(file):
        return
    with part_of(file) as part:
        part.write_text(card(folder, work, data, judged), encoding="utf-8")


def card(folder: Path, work: Path, data: DataFolder, judged: Judged) -> str:
    """Return the card of the drafter in a folder."""
    head, run, here, about = read_head(folder), read_kept(work / RUN), machine(), data.about
    said, plan = run["about"], run["plan"]
    target = name_of(Path(said["target"]))
    is_known = target != said["target"]  # on the hub
    begin = said.get("begin")
    return TEXT.format(
        base=f"\nbase_model: {target}" if is_known else "", licence=NO_LICENCE,
        kind=SMALL if head is None else head.kind,
        commands=SERVE if head is None else f"{SERVE}\n{EXPORT}",
        target=literal(target if is_known else Path(target).name), what=_what(head),
        begin=literal(name_of(Path(begin)) if begin else _new(head, said)), size=_size(folder),
        samples=sum(shard.samples for shard in data.shards),
        said=sum(shard.said for shard in data.shards), prompts=about.num_prompts,
        digest=about.prompts, heats=", ".join(f"{heat:g}" for heat in about.temperatures),
        steps=last_step(work / CURVES) or run["steps"],
        batch=plan["batch"] * plan["accumulate"], rate=plan["rate"], loss=said["loss"],
        depth=said["depth"], more=_more(said), greedy=judged.acceptance_length,
        coupled=judged.coupled_length, outrider=__version__, torch=version("torch"),
        cpu=here["cpu"], date=here["date"][:10], begin_mark=BEGIN, end_mark=END,
        unmeasured=UNMEASURED,
    )  # fmt: skip


def _what(head: Head | None) -> str:
    """Return what a drafter is called."""
    if head is None:
        return "Small model"
    if head.kind == MEDUSA:
        return f"{head.longest} Medusa heads"
    return "EAGLE-3 head" if head.kind == EAGLE3 else "P-EAGLE head"


def _new(head: Head | None, said: Mapping[str, Any]) -> str:
    """Return what a new drafter was made of; ``said`` describes its training."""
    if head is None:
        return f"new, of the target's layers {', '.join(map(str, said['layers']))}"
    return "new, with the target's output rows"


def _more(said: Mapping[str, Any]) -> str:
    """Return further facts about a small model's training, each after a comma."""
    rank, own = said.get("rank"), said.get("own")
    return (f", LoRA of rank {rank}" if rank else "") + (f", {own:.0%} own answers" if own else "")


def _size(folder: Path) -> str:
    """Return the size of a drafter, and how many ids it drafts."""
    files = Files(folder)
    head, weights = read_head(files), sum(entry.nbytes for entry in files.tensors.values())
    size = f"{weights / 1e6:.1f} MB"
    if head is None:
        shape = open_checkpoint(files).shape
        return f"{size}, for {shape.vocab_size:,} token ids"
    drafted = head.vocab_size if head.architecture is None else head.architecture.vocab_size
    return f"{size}, for {drafted:,} of the target's {head.vocab_size:,} token ids"


def add_measured(folder: Path, extras: Extras) -> None:
    """Write what was measured into the card in a folder, if there is one with a place for it."""
    file = folder / CARD
    if not file.exists():
        return
    text = _read(file)
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if end:
        with part_of(file) as part:
            text = f"{before}{begin}\n{table(extras)}\n{end}{after}"
            part.write_text(text, encoding="utf-8", errors="surrogateescape")


def _read(file: Path) -> str:
    """Return the text of a card, which a person may have saved in any encoding."""
    return file.read_text(encoding="utf-8", errors="surrogateescape")


def table(extras: Extras) -> str:
    """Return what was measured as a Markdown table, and the recommended lengths."""
    rows = [
        "| use | temperature | acceptance length | accepted by position | prompts |",
        "|" + 5 * " -- |",
    ]
    for each in extras.measured:
        shares = " ".join(f"{share:.2f}" for share in each.by_position)
        rows.append(
            f"| {literal(each.use)} | {each.temperature:g} | {each.acceptance_length:.2f} | "
            f"{shares} | {each.prompts} of {literal(each.data)} ({literal(each.digest[:16])}) |"
        )
    lengths = ", ".join(f"{length} for {use}" for use, length in extras.lengths.items())
    made = sorted({literal(f"{each.machine}, {each.date}") for each in extras.measured})
    fastest = f"Fastest draft lengths: {lengths}. " if lengths else ""
    return "\n".join([*rows, "", f"{fastest}Measured on {'; '.join(made)}."])


def literal(text: str) -> str:
    """Return a text as one line, with the special characters of Markdown and HTML escaped."""
    return re.sub(r"[\\`*\[\]<>|&]", r"\\\g<0>", printable(text))
