"""What OpenVINO computes with: CONVERSION CHECKPOINT FOLDER.

Writes the checkpoint again with every matrix that the conversion holds in few bits replaced by the
numbers that they stand for.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import openvino as ov
import torch
from safetensors.torch import load_file, save_file

ORIGIN = "._openvino_orig_weight"
STEPS = ("Convert", "Subtract", "Multiply", "Reshape")


def following(node: Any) -> Any:
    """The operation that takes a node's output."""
    return next(iter(node.output(0).get_target_inputs())).get_node()


def dequantised(conversion: Path) -> dict[str, torch.Tensor]:
    """Matrices by their names in the checkpoint, in fp32."""
    core = ov.Core()
    model = core.read_model(conversion / "openvino_model.xml")
    found = {}
    for node in model.get_ordered_ops():
        name = node.get_friendly_name()
        if node.get_type_name() != "Constant" or not name.endswith(ORIGIN):
            continue
        while following(node).get_type_name() in STEPS:
            node = following(node)
        part = ov.Model([node.output(0)], [], "part")
        run = core.compile_model(part, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        made = torch.from_numpy(run([])[0].copy()).float()
        found[name.removeprefix("self.").removesuffix(ORIGIN) + ".weight"] = made.flatten(1)
    return found


def main() -> None:
    """Write FOLDER; what is not of few bits stays as it was."""
    conversion, checkpoint, folder = map(Path, sys.argv[1:])
    made = dequantised(conversion)
    folder.mkdir(parents=True, exist_ok=True)
    for file in checkpoint.iterdir():
        if file.suffix == ".safetensors":
            tensors = load_file(file)
            few = {name: made[name].contiguous() for name in tensors if name in made}
            wrong = [name for name, value in few.items() if value.shape != tensors[name].shape]
            if wrong or not few:
                sys.exit(f"{conversion} is no conversion of {checkpoint}: {wrong}")
            save_file({**tensors, **few}, folder / file.name, metadata={"format": "pt"})
        elif file.is_file():
            shutil.copy(file, folder)


if __name__ == "__main__":
    main()
