"""Diagnosis: what is wrong with a running engine, and what an installation lacks."""

from .checklist import checklist
from .diagnose import Problem, diagnose
from .doctor import Finding, doctor

__all__ = ["Finding", "Problem", "checklist", "diagnose", "doctor"]
