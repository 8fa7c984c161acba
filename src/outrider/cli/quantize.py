"""``outrider quantize``: a checkpoint made few-bit once and for all."""

from pathlib import Path

import typer

from .common import ended_cleanly, lines, status
from .flags import argument, setting


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
