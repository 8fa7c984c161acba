"""Refuses features whose extra packages are not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from ..errors import ConfigError

OF_TORCH = ("torch", "transformers")
"""Packages of the extra "torch"."""
INSTALL = "pip install 'outrider[{extra}]'"


@contextmanager
def torch_for(what: str, program: bool = False, extra: str = "torch") -> Iterator[None]:
    """Raise ConfigError naming the extra if an import inside lacks one of its packages.

    ``what`` begins the message: the feature that needs them. A ``program`` exits with the message
    instead. The extra "train" has the packages of "torch", too.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package not in (*OF_TORCH, "accelerate"):  # accelerate is for training
            raise
        said = f"{what} needs {package}, which is not installed: {INSTALL.format(extra=extra)}."
        if program:
            raise SystemExit(said) from None
        raise ConfigError(said) from None


def need_torch(what: str) -> None:
    """Refuse ``what`` if a package of the extra is not installed; imports nothing."""
    with torch_for(what):
        for package in OF_TORCH:
            if find_spec(package) is None:
                raise ModuleNotFoundError(name=package)
