"""Where files lie that Outrider makes for itself."""

import os
from pathlib import Path


def cache_home() -> Path:
    """Return the folder of what can be made again: ``outrider`` in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "outrider"
