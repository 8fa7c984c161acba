"""The audit of somebody's server: does it say what its model says, speculation or not?"""

from .audit import SAMPLES, verify_endpoint
from .outcome import Column, EndpointReport, Result, Status, Verdict

__all__ = ["SAMPLES", "Column", "EndpointReport", "Result", "Status", "Verdict", "verify_endpoint"]
