"""``outrider convert`` and ``outrider quantize``: copies of checkpoints."""

from pathlib import Path

import typer

from ..errors import ConfigError
from .common import AsJson, ended_cleanly, lines, status, write_json
from .flags import argument, setting


def convert(
    model: str = argument(
        "MODEL",
        "A checkpoint's folder or hub name: a model, an EAGLE-3 head or Medusa heads, "
        "with .bin, .pt or .safetensors files.",
    ),
    out: Path = argument("OUT", "The new folder."),
) -> None:
    """Convert a checkpoint to safetensors, the only format that is served.

    Pickled weights are read as tensors alone, in a process of its own with a limit on its memory.
    """
    with status("converting"), lines("converting"), ended_cleanly():
        from ..checkpoints.convert import PICKLED
        from ..checkpoints.convert import convert as converted
        from ..checkpoints.folders import find_folder
        from ..checkpoints.heads import read_head

        count = converted(find_folder(model, [f"*{suffix}" for suffix in PICKLED]), out)
        head = read_head(out)
    what = "a checkpoint" if head is None else f"drafter {head.kind}"
    typer.echo(f"{out}: {what} of {count} tensors", err=True)


def quantize(
    model: str = argument(
        "MODEL",
        "A checkpoint's folder, .gguf file or hub name: a model, an EAGLE-3 head or Medusa heads.",
    ),
    out: Path = argument("OUT", "The new folder, or a new .gguf file."),
    quantization: str = setting(
        ...,
        "Of a folder: int8 or int4, with -g32, -g64, -g128 or -channel for the group, and -zp "
        "for zero points, as in int4-g64-zp. Of a .gguf file: F16, BF16, Q8_0, "
        "Q4_0 or Q4_K_M.",
        metavar="RECIPE",
    ),
    json_: AsJson = False,
) -> None:
    """Write a quantised copy of a checkpoint.

    A folder has the layout of compressed-tensors; a .gguf file is read by llama.cpp, too.
    """
    with status("loading"):
        from ..base.config import Recipe
        from ..checkpoints.export import export
        from ..checkpoints.folders import find_folder
        from ..checkpoints.formats.gguf import is_gguf
        from ..checkpoints.gguf_export import RECIPES, export_gguf, parse
        from ..checkpoints.head_quantize import quantize_head
        from ..checkpoints.heads import read_head
    with lines("quantising"), ended_cleanly():
        if is_gguf(out):
            recipe, folder = parse(quantization), find_folder(model)
            if read_head(folder) is not None:
                raise ConfigError(
                    f"{model} is a drafter's head, which cannot be written as a .gguf file; give "
                    "the name of a folder, and int8 or int4."
                )
            bits = export_gguf(folder, out, recipe)
        elif quantization.upper() in RECIPES:
            raise ConfigError(
                f"quantization {quantization} is for .gguf files, but {out} names a folder; end "
                "its name in .gguf, or give int4 or int8."
            )
        else:
            parsed, folder = Recipe.parse(quantization), find_folder(model)
            recipe, head = str(parsed), read_head(folder)
            bits = export(folder, out, parsed) if head is None else quantize_head(head, out, parsed)
    report = {"out": str(out), "quantization": recipe, "bits_per_weight": bits}
    write_json(report, "-" if json_ else None)
    typer.echo(f"{out}: {bits:.2f} bits per weight", err=True)
