"""Exports a checkpoint to OpenVINO's format with optimum-intel: CHECKPOINT FOLDER DTYPE.

bfloat16 is stored as float16, as OpenVINO's users do, and computed in bfloat16; int8 and int4 are
the exporter's own defaults.
"""

import subprocess
import sys

FORMATS = {"float32": "fp32", "bfloat16": "fp16", "int8": "int8", "int4": "int4"}


def main() -> None:
    """Export; leaves openvino_model.xml and the tokenizer in FOLDER."""
    checkpoint, folder, dtype = sys.argv[1:]
    sys.exit(subprocess.call([
        sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino",
        "--model", checkpoint, "--task", "text-generation-with-past",
        "--weight-format", FORMATS[dtype], folder,
    ]))  # fmt: skip


if __name__ == "__main__":
    main()
