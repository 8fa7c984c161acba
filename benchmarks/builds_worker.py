"""Outrider by the peers' protocol, from a folder rather than from what is installed."""

import sys
from pathlib import Path

from .peers.runners.serve import Runner, Spec, Unsupported, serve


def use_package(folder: str) -> None:
    """Import ``outrider`` from below ``folder`` from now on."""
    # The hooks of an editable installation come before any folder.
    hooks = ("Redirecting", "Editable")
    sys.meta_path[:] = [
        finder for finder in sys.meta_path if not any(h in type(finder).__name__ for h in hooks)
    ]
    sys.path.insert(0, folder)
    import outrider

    if not Path(str(outrider.__file__)).is_relative_to(folder):
        raise Unsupported(f"{folder} holds no package outrider; give the folder above it")


def open_build(spec: Spec) -> Runner:
    """Return ``own.Own`` of the package below the folder ``spec["package"]``."""
    folder = spec["package"]
    use_package(folder)
    from outrider.native.choice import library

    if library() is None:
        raise Unsupported(f"the package in {folder} has no native step; put its libraries there")
    from .peers.runners.own import Own

    return Own(spec)


if __name__ == "__main__":
    serve(open_build)
