"""``outrider convert`` and ``outrider quantize``: copies of checkpoints."""

from pathlib import Path

import typer

from .common import ended_cleanly, lines, status
from .flags import argument, setting


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


def quantize(
    model: str = argument("MODEL", "A checkpoint's folder, .gguf file or hub name."),
    out: Path = argument("OUT", "The new folder."),
    quantization: str = setting(
        ...,
        "int8 or int4, with -g32, -g64, -g128 or -channel for the group, "
        "and -zp for zero points, as in int4-g64-zp.",
        metavar="RECIPE",
    ),
) -> None:
    """Write a quantised copy of a checkpoint, in the layout of compressed-tensors."""
    with status("loading"):
        from ..base.config import Recipe
        from ..checkpoints.export import export
        from ..checkpoints.families import find_folder
    recipe = Recipe.parse(quantization)
    with lines("quantising"), ended_cleanly():
        bits = export(find_folder(model), out, recipe)
    typer.echo(f"{out}: {bits:.2f} bits per weight", err=True)
