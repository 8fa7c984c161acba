"""The table of serving engines: our names, their own, and other spellings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..errors import ConfigError, shown


class EngineName(NamedTuple):
    """An engine: its name in commands, specs, policies and labels; its own; other spellings."""

    name: str
    title: str
    others: tuple[str, ...] = ()


TABLE = (
    EngineName("outrider", "Outrider"),
    EngineName("vllm", "vLLM"),
    EngineName("sglang", "SGLang"),
    EngineName("trtllm", "TensorRT-LLM", ("tensorrt_llm", "tensorrt", "trt_llm")),
    EngineName("triton", "Triton", ("tritonserver",)),
    EngineName("llamacpp", "llama.cpp", ("llama_cpp", "llama_server")),
    EngineName("tgi", "TGI", ("text_generation_inference",)),
)
BY_NAME = {name: each for each in TABLE for name in (each.name, *each.others)}


def find_engine(name: object) -> EngineName | None:
    """Return the engine that a name in any spelling means, such as ``TensorRT-LLM``, or None."""
    if not isinstance(name, str):
        return None
    return BY_NAME.get(name.strip().lower().replace("-", "_").replace(".", "_"))


def named_engine(name: object, where: str, among: Iterable[str]) -> str:
    """Return our name of the engine that ``name`` means, one of ``among``; errors say ``where``."""
    known = list(among)
    engine = find_engine(name)
    if engine is None or engine.name not in known:
        raise ConfigError(f"{where} is {shown(name)}; known are {', '.join(known)}.")
    return engine.name
