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


class Gpus:
    """NVML, opened once; without it there are no GPUs."""

    def __init__(self) -> None:
        self._nvml: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
        except Exception:  # no module, no driver, another driver: each has an error of its own
            return

    def read(self) -> list[GpuUse]:
        """Return the GPUs; one that does not answer is left out."""
        nvml = self._nvml
        if nvml is None:
            return []
        found = []
        for index in range(_ask(nvml, "nvmlDeviceGetCount") or 0):
            device = _ask(nvml, "nvmlDeviceGetHandleByIndex", index)
            memory = _ask(nvml, "nvmlDeviceGetMemoryInfo", device)
            name = _ask(nvml, "nvmlDeviceGetName", device)
            busy = _ask(nvml, "nvmlDeviceGetUtilizationRates", device)  # none on a MIG slice
            if memory is not None:
                text = name.decode() if isinstance(name, bytes) else str(name or "")
                share = None if busy is None else busy.gpu / 100
                found.append(GpuUse(index, text, int(memory.used), int(memory.total), share))
        return found


def _ask(nvml: Any, name: str, *arguments: Any) -> Any:
    """Return what NVML answers, None if it refuses."""
    try:
        return getattr(nvml, name)(*arguments)
    except nvml.NVMLError:
        return None
