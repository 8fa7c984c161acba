"""The folder of files that Outrider makes for itself."""

import os
from pathlib import Path


def cache_home() -> Path:
    """Return the folder for files that can be made again: ``outrider`` in the user's cache folder.

    A user without a home gets a path where no file can exist.
    """
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(home) if home else Path.home() / ".cache") / "outrider"
    except RuntimeError:  # e.g. an id without a name in a container
        return Path(os.devnull)
