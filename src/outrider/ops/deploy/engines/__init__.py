"""One module per engine: a spec in, what starts the engine out."""

from collections.abc import Callable

from ..capabilities import Engine
from ..launch import Launch
from ..spec import Spec
from . import llamacpp, outrider, sglang, triton, trtllm, vllm

LAUNCHES: dict[str, Callable[[Spec, Engine], Launch]] = {
    "outrider": outrider.launch,
    "vllm": vllm.launch,
    "sglang": sglang.launch,
    "trtllm": trtllm.launch,
    "triton": triton.launch,
    "llamacpp": llamacpp.launch,
}
