"""Changes another engine's modules as they are imported, and not before.

The modules that run models must not be imported in the process that starts the engine. One that
cannot be changed cannot be imported.
"""

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from .signatures import SignatureError, Surface
from .start import stop

Patch = Callable[[ModuleType], None]


def install(surface: Surface, patches: Mapping[str, Patch]) -> None:
    """Check an engine, and change its modules now or when they are imported, or end the process."""
    try:
        version = surface.check_installed()
    except SignatureError as error:
        stop(str(error))
    if patch_imports(patches):
        logging.getLogger(f"{surface.package}.outrider").info(
            "Outrider's rule is active in %s %s: tokens depend on the seed, not on drafts.",
            surface.engine,
            version,
        )


def patch_imports(patches: Mapping[str, Patch]) -> bool:
    """Change modules, by name, now or when they are imported; return False if that was done."""
    if patched(patches):
        return False
    for name, patch in patches.items():
        if name in sys.modules:
            patch(sys.modules[name])
    sys.meta_path.insert(0, _Finder(patches))
    return True


def patched(patches: Mapping[str, Patch]) -> bool:
    """Return whether ``patch_imports`` was called in this process."""
    return any(isinstance(each, _Finder) and each.patches is patches for each in sys.meta_path)


def changing(functions: Mapping[str, str], package: str) -> Patch:
    """Return a patch that changes a module's functions.

    ``functions`` has by ``function`` or ``Class.function`` the ``module:function`` of our package
    that makes the new one of it, or with = in front takes its place.
    """

    def patch(module: ModuleType) -> None:
        for name, ours in functions.items():
            place, _, made = ours.removeprefix("=").partition(":")
            function = getattr(import_module(f"{package}.{place}"), made)
            owner, last = module, name
            if "." in name:
                kind, _, last = name.partition(".")
                owner = getattr(module, kind)
            if not ours.startswith("="):
                function = function(getattr(owner, last))
            setattr(owner, last, function)

    return patch


class _Finder(MetaPathFinder):
    """Finds modules where the other finders do, and changes them once they ran."""

    def __init__(self, patches: Mapping[str, Patch]) -> None:
        self.patches = patches

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.patches:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            run, patch = spec.loader.exec_module, self.patches[name]

            def exec_module(module: ModuleType) -> None:
                run(module)
                patch(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
