"""The folder of files that Outrider makes for itself."""

import os
from pathlib import Path


def cache_home() -> Path:
    """Return the folder of what can be made again: ``outrider`` in the user's cache folder.

    A user without a home gets a path where no file can be.
    """
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(home) if home else Path.home() / ".cache") / "outrider"
    except RuntimeError:  # as of an id that a container has no name for
        return Path(os.devnull)
