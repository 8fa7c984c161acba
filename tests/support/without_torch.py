"""A plugin of pytest where torch is not installed: what needs it is skipped, all else runs.

Test modules import torch for some of their tests. Here they get a stand-in, whose use in a test
skips that test: ``python -m pytest -p tests.support.without_torch``.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Generator, Sequence
from types import ModuleType
from typing import Any

import pytest

ABSENT = ("torch", "transformers", "accelerate")

_running = False


class StandIn(ModuleType):
    """A module, class or function that is not there: modules may name it, and no test use it."""

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name == "__version__" and _running:
            pytest.skip(f"{self.__name__} is not installed")
        if name.startswith("__"):
            raise AttributeError(name)
        found = StandIn(f"{self.__name__}.{name}")
        setattr(self, name, found)
        return found

    def __call__(self, *args: Any, **options: Any) -> Any:
        if _running:
            pytest.skip(f"{self.__name__} is not installed")
        return args[0] if args else self  # a decorator, or what makes one

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return ()

    def __instancecheck__(self, instance: Any) -> bool:
        return False

    def __or__(self, other: Any) -> Any:
        return Any

    __ror__ = __or__

    def __getitem__(self, of: Any) -> Any:
        return self


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        here = name.partition(".")[0] in ABSENT
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if here else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Finder())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Skip tests, not modules: only while a test runs, what is used is needed."""
    global _running
    _running = True
    try:
        return (yield)
    finally:
        _running = False
