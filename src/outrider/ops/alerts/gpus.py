"""The GPUs of this machine by NVML, where there is one and ``nvidia-ml-py`` is installed."""

from __future__ import annotations

from typing import Any, NamedTuple


class GpuUse(NamedTuple):
    """One GPU: memory in bytes, ``busy`` as a share of the last moment."""

    number: int
    name: str
    used: int
    total: int
    busy: float | None


def gpus() -> list[GpuUse]:
    """Return the GPUs, none where there is no NVML; one that does not answer is left out."""
    try:
        import pynvml

        pynvml.nvmlInit()  # counted: later calls cost nothing
    except Exception:  # no module, no driver, another driver: each has an error of its own
        return []

    def ask(name: str, *arguments: Any) -> Any:
        try:
            return getattr(pynvml, name)(*arguments)
        except pynvml.NVMLError:
            return None

    seen = []
    for index in range(ask("nvmlDeviceGetCount") or 0):
        device = ask("nvmlDeviceGetHandleByIndex", index)
        memory, name = ask("nvmlDeviceGetMemoryInfo", device), ask("nvmlDeviceGetName", device)
        busy = ask("nvmlDeviceGetUtilizationRates", device)  # none on a MIG slice
        if memory is not None:
            text = name.decode() if isinstance(name, bytes) else str(name or "")
            share = None if busy is None else busy.gpu / 100
            seen.append(GpuUse(index, text, int(memory.used), int(memory.total), share))
    return seen
