"""What tests of several rooms share: tiny checkpoints, servers, stand-ins, hostile input."""

from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
DATA = REPOSITORY / "tests" / "data"
