"""The recipe of the pocket target's heads: ``python -m outrider.pocket.heads``.

The target answers openings of the modules that it was trained on. An EAGLE-3 head and three Medusa
heads learn from the answers, are quantised to int8, and are measured on held-out modules. Results
of every stage are kept below ``--work``, from which it goes on.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from ..base.alone import alone
from ..base.config import BUNDLED, POCKET, Recipe
from ..base.extras import torch_for
from ..bench.workload import Item
from ..checkpoints.head_quantize import quantize_head
from ..checkpoints.heads import EAGLE3, MEDUSA, Head, read_head
from . import prompts as held_out_prompts

with torch_for("python -m outrider.pocket.heads", program=__name__ == "__main__"):
    from transformers import PreTrainedTokenizerFast

    from ..training.card import CARD, NO_LICENCE, write_card
    from ..training.data import DataOptions, make_data
    from ..training.loop import Judged
    from ..training.measure import measure
    from ..training.plan import Plan
    from ..training.prompts import save_prompts
    from ..training.run_heads import BATCH, RATE, WORK, HeadOptions, train_head
    from ..training.samples import DataFolder
    from .corpus import standard_library
    from .evaluate import OUTPUT_TOKENS, prompts_of

HEADS = {EAGLE3: (HeadOptions(coverage=1.0), 0.85), MEDUSA: (HeadOptions(depth=3), 0.15)}
"""The heads' options, and what part of the minutes each trains."""
TEMPERATURES = (0.0, 0.7, 1.0)
QUANTIZATION = "int8"
LICENCE = """\
Apache-2.0, as Outrider. It was trained on what the pocket target says of the source of Python's
standard library (PSF licence 2.0)."""


def make_answers(work: Path, count: int) -> DataFolder:
    """Have the target answer ``count`` openings, and return what it says."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(BUNDLED)
    modules = [module for module in standard_library() if not module.held_out]
    file = work / "prompts.jsonl"
    save_prompts([Item(text) for text in prompts_of(modules, tokenizer, count)], file)
    options = DataOptions(prompts=file, temperatures=TEMPERATURES, states=True)
    return make_data(POCKET, work / "data", options, _told, print)


def _told(done: int, count: int, what: str = "answers") -> None:
    print(f"{what}: {done} of {count}", flush=True)


def finish(work: Path, kind: str, data: DataFolder, judged: Judged, out: Path) -> Head:
    """Quantise the trained head in a folder of ``work``, measure it, and write it to ``out``."""
    head, small, file = read_head(work / kind), work / f"{kind}-small", work / "held-out.jsonl"
    assert head is not None
    shutil.rmtree(small, ignore_errors=True)  # of an earlier run
    quantize_head(head, small, Recipe.parse(QUANTIZATION))
    (small / CARD).unlink()  # it says the size of the other
    write_card(small, work / kind / WORK, data, judged)
    text = (small / CARD).read_text(encoding="utf-8")
    (small / CARD).write_text(text.replace(NO_LICENCE, LICENCE), encoding="utf-8")
    save_prompts([Item(text) for text in held_out_prompts()], file)
    measure(small, None, {"code": file}, OUTPUT_TOKENS, print)
    shutil.copytree(small, out / kind, dirs_exist_ok=True)
    written = read_head(out / kind)
    assert written is not None
    return written


def build(
    work: Path, out: Path, prompts: int, steps: int | None, minutes: float | None
) -> dict[str, Any]:
    """Run the recipe; return the bytes of each head, and what was measured of it."""
    with alone(work):
        data = make_answers(work, prompts)
        report = {}
        for kind, (options, part) in HEADS.items():
            plan = Plan(steps=steps, minutes=minutes and part * minutes, rate=RATE, batch=BATCH)
            trained = train_head(kind, Path(POCKET), data, None, work / kind, plan, options)
            report[kind] = _row(finish(work, kind, data, trained.judged, out))
        return report


def _row(head: Head) -> dict[str, Any]:
    extras = head.extras
    return {
        "bytes": sum(entry.nbytes for entry in head.files.tensors.values()),
        "measured": [each.said() for each in extras.measured if each.use == "code"],
        "recommended": dict(extras.lengths),
    }


def main() -> None:
    """Make the heads and print their figures as JSON."""
    parser = argparse.ArgumentParser(prog="python -m outrider.pocket.heads", description=__doc__)
    work, out = "data and training, to go on from", "folder for eagle3/ and medusa/"
    parser.add_argument("--work", type=Path, default=Path("build/pocket-heads"), help=work)
    parser.add_argument("--out", type=Path, required=True, help=out)
    parser.add_argument("--prompts", type=int, default=8000, help="openings that are answered")
    parser.add_argument("--steps", type=int, help="steps of each training, not three epochs")
    parser.add_argument("--minutes", type=float, help="minutes of both trainings, about")
    print(json.dumps(build(**vars(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
