"""The audit of somebody's server: does it say what its model says, speculation or not?"""

from .audit import SAMPLES, verify_endpoint
from .outcome import EndpointReport, Result, Status

__all__ = ["SAMPLES", "EndpointReport", "Result", "Status", "verify_endpoint"]
