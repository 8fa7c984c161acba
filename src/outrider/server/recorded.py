"""The metrics of a recording."""

from __future__ import annotations

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from .metrics import Family
from .record import Recorder


def recorded(recorder: Recorder) -> tuple[Family, ...]:
    """Return the families on what is recorded."""
    gauge, counter = GaugeMetricFamily, CounterMetricFamily
    return (
        (counter, "outrider_recorded_prompts",
         "Prompts recorded since the start.", (), {(): recorder.written}),
        (counter, "outrider_recording_duplicates", "Prompts that were recorded already.", (),
         {(): recorder.duplicates}),
        (counter, "outrider_recording_left_out", "Prompts left out: no room, or redacted.", (),
         {(): recorder.left_out}),
        (gauge, "outrider_recording_bytes", "Bytes of the file of prompts.", (),
         {(): recorder.size}),
        (gauge, "outrider_recording_stopped",
         "1 once recording has ended: full or failed.", ("reason",),
         {(recorder.stopped,): 1.0} if recorder.stopped else {}),
    )  # fmt: skip
