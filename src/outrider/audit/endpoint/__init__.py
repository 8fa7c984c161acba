"""The audit of a server: does it emit what its model emits, with or without speculation?"""

from .audit import SAMPLES, verify_endpoint
from .outcome import Column, EndpointReport, Result, Status, Verdict

__all__ = ["SAMPLES", "Column", "EndpointReport", "Result", "Status", "Verdict", "verify_endpoint"]
