"""The model card beside a trained head: what it is of, what it learned from, and what it gives."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

from .. import __version__
from ..base.kept import part_of, read_kept
from ..bench.machine import machine
from ..checkpoints.extras import Extras
from ..checkpoints.heads import Head, read_head
from .loop import RUN, Judged
from .samples import DataFolder

CARD = "README.md"
BEGIN, END = "<!-- measured -->", "<!-- /measured -->"
UNMEASURED = (
    "Nothing yet; `outrider train measure` measures it as it is served, and writes it here."
)
NO_LICENCE = """\
**Licence: not chosen yet.** Whoever publishes this names one here. It was trained on what the
target says, so the licences of the target and of the prompts count."""
TEXT = """---
library_name: outrider{base}
tags: [speculative-decoding, {kind}]
---
# A drafter of {target}

{what} It proposes tokens that the target checks; the target's output stays the same.

```
outrider serve TARGET --drafter THIS_FOLDER
```

{licence}

## Training

| | |
| -- | -- |
| target | {target} |
| began as | {begin} |
| data | {samples:,} samples of the target's answers, {said:,} tokens to learn from |
| prompts | {prompts:,}, digest `{digest}`, answered at temperatures {heats} |
| training | {steps:,} steps of {batch:,} tokens, rate {rate:g}, loss {loss}, depth {depth} |
| held-out samples | {greedy:.2f} tokens a step at temperature 0, {coupled:.2f} at 1, forecast |
| made with | outrider {outrider}, torch {torch}, {cpu}, {date} |

## Measured

{begin_mark}
{unmeasured}
{end_mark}
"""


def write_card(folder: Path, work: Path, data: DataFolder, judged: Judged) -> None:
    """Write the card of the head in a folder, whose training was in the folder ``work``.

    A card that is there already is kept where a person changed its licence line.
    """
    file = folder / CARD
    if file.exists() and "Licence: not chosen yet" not in _read(file):
        return
    with part_of(file) as part:
        part.write_text(card(folder, work, data, judged), encoding="utf-8")


def card(folder: Path, work: Path, data: DataFolder, judged: Judged) -> str:
    """Return the card of the head in a folder."""
    head, run, here, about = read_head(folder), read_kept(work / RUN), machine(), data.about
    assert head is not None
    said, plan = run["about"], run["plan"]
    target = str(said["target"])
    named = "" if os.path.exists(target) else f"\nbase_model: {target}"
    return TEXT.format(
        base=named, licence=NO_LICENCE, kind=head.kind,
        target=Path(target).name if not named else target,
        what=_what(head), begin=said.get("begin") or "untrained",
        samples=sum(shard.samples for shard in data.shards),
        said=sum(shard.said for shard in data.shards), prompts=about.num_prompts,
        digest=about.prompts, heats=", ".join(f"{heat:g}" for heat in about.temperatures),
        steps=run["steps"], batch=plan["batch"] * plan["accumulate"], rate=plan["rate"],
        loss=said["loss"], depth=said["depth"], greedy=judged.acceptance_length,
        coupled=judged.coupled_length, outrider=__version__, torch=version("torch"),
        cpu=here["cpu"], date=here["date"][:10], begin_mark=BEGIN, end_mark=END,
        unmeasured=UNMEASURED,
    )  # fmt: skip


def _what(head: Head) -> str:
    weights = sum(entry.nbytes for entry in head.files.tensors.values())
    size = f"{weights / 1e6:.1f} MB"
    if head.architecture is None:
        return f"{head.longest} Medusa heads, {size}."
    drafted = head.architecture.vocab_size
    return f"An EAGLE-3 head, {size}, that drafts {drafted:,} of {head.vocab_size:,} ids."


def add_measured(folder: Path, extras: Extras) -> None:
    """Put what was measured into the card in a folder, if there is one with a place for it."""
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
    """Return what was measured as a table, and the lengths that are recommended."""
    rows = [
        "| use | temperature | tokens a step | accepted by position | prompts |",
        "|" + 5 * " -- |",
    ]
    for each in extras.measured:
        shares = " ".join(f"{share:.2f}" for share in each.by_position)
        rows.append(
            f"| {each.use} | {each.temperature:g} | {each.acceptance_length:.2f} | {shares} | "
            f"{each.prompts} of {each.data} (`{each.digest[:16]}`) |"
        )
    lengths = ", ".join(f"{length} for {use}" for use, length in extras.lengths.items())
    made = sorted({f"{each.machine}, {each.date}" for each in extras.measured})
    fastest = f"Draft lengths that were fastest: {lengths}. " if lengths else ""
    return "\n".join([*rows, "", f"{fastest}Measured on {'; '.join(made)}."])
