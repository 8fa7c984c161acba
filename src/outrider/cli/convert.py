"""``outrider convert``: a checkpoint with pickled weights made readable, once and for all."""

from pathlib import Path

import typer

from .common import ended_cleanly, lines, status
from .flags import argument


def convert(
    model: str = argument(
        "MODEL",
        "A checkpoint's folder or hub name: a model, an EAGLE-3 head or Medusa heads, "
        "with .bin, .pt or .safetensors files.",
    ),
    out: Path = argument("OUT", "The new folder."),
) -> None:
    """Write a checkpoint with safetensors, which are all that serving reads.

    Pickled weights are read as tensors alone, in a process of its own with a limit on its memory.
    """
    with status("converting"), lines("converting"), ended_cleanly():
        from ..checkpoints.convert import PICKLED
        from ..checkpoints.convert import convert as converted
        from ..checkpoints.families import find_folder
        from ..checkpoints.heads import read_head

        count = converted(find_folder(model, [f"*{suffix}" for suffix in PICKLED]), out)
        head = read_head(out)
    what = "a checkpoint" if head is None else f"drafter {head.kind}"
    typer.echo(f"{out}: {what} of {count} tensors", err=True)
