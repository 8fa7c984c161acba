"""The formats of quantised checkpoints, by the name in ``quantization_config``."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...errors import ModelError, shown
from .compressed import Compressed, Fp8
from .grouped import Awq, Gptq
from .shared import REMEDY, Format

FORMATS: dict[str, Callable[[Mapping[str, Any], Path], Format]] = {
    "gptq": Gptq,
    "awq": Awq,
    "compressed-tensors": Compressed,
    "fp8": Fp8,
    "fbgemm_fp8": Fp8,
}


def find_format(options: Mapping[str, Any] | None, where: Path) -> Format | None:
    """Return the format that a config's ``quantization_config`` names; None if it is empty."""
    if not options:
        return None
    method = str(options.get("quant_method", "an unnamed method"))
    if method not in FORMATS:
        raise ModelError(
            f"{where}: weights quantised by {shown(method)} (quantization_config) are not read, "
            f"only by {', '.join(FORMATS)}; {REMEDY}."
        )
    return FORMATS[method](options, where)
