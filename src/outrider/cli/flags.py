"""Makes flags of tables: of the engine's options, and of dataclasses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from ..base.config import ENGINE_OPTIONS
from ..base.options import Option

Command = Callable[..., None]
COMMON = ("drafter", "num_speculative_tokens", "quantization")
"""Engine options that stand first in the help of a command that has all."""


def setting(default: Any, help: str, *names: str, **more: Any) -> Any:
    """Return an option of a command, as the default of a parameter or of a field of flags.

    ``names`` and ``more`` are those of typer's option.
    """
    return typer.Option(default, *names, help=help, **more)


def sampling(help: str, **more: Any) -> Any:
    """Return an option of ``generate`` in the panel of sampling, unset by default."""
    return setting(None, help, rich_help_panel="Sampling", **more)


def argument(metavar: str, help: str, default: Any = ..., **more: Any) -> Any:
    """Return an argument of a command, as the default of a parameter."""
    return typer.Argument(default, metavar=metavar, help=help, **more)


def parameter(option: Option, panel: str | None = None, **more: Any) -> inspect.Parameter:
    """Return the parameter of an option's flag, None unless given; help has the default."""
    shown = "" if option.default in (None, False) else f" [{option.default}]"
    names = [option.flag] if option.type is not bool else []
    info = typer.Option(
        *names, help=option.help + shown, show_default=False, show_envvar=False,
        rich_help_panel=panel, **more,
    )  # fmt: skip
    of_type: Any = option.type
    kind, annotation = inspect.Parameter.KEYWORD_ONLY, Annotated[of_type | None, info]
    return inspect.Parameter(option.name, kind, default=None, annotation=annotation)


def engine_options(*names: str) -> list[inspect.Parameter]:
    """Return the parameters of the engine options of these names, all where there are none."""
    return [
        parameter(option, None if option.name in (names or COMMON) else "The engine")
        for option in ENGINE_OPTIONS
        if option.name in names or not names
    ]


def with_parameters(parameters: Iterable[inspect.Parameter]) -> Callable[[Command], Command]:
    """Give a command further parameters, which reach its ``**options``; its own stay."""

    def decorate(command: Command) -> Command:
        _sign(command, [*_own(command), *parameters])
        return command

    return decorate


def with_flags(
    owner: type[Any], parameters: Iterable[inspect.Parameter] = ()
) -> Callable[[Command], Command]:
    """Give a command the fields of a dataclass as flags; it gets an object of the class first.

    The fields stand in the order of their use. ``parameters`` follow them, and reach the command's
    ``**options``.
    """
    hints, flags = get_type_hints(owner, include_extras=True), list[inspect.Parameter]()
    for each in fields(owner):
        info: Any = inspect.Parameter.empty if each.default is MISSING else each.default
        if hints[each.name] is bool and not info.param_decls:
            info.param_decls = ("--" + each.name.replace("_", "-"),)
        kind = inspect.Parameter.KEYWORD_ONLY
        flags.append(inspect.Parameter(each.name, kind, default=info, annotation=hints[each.name]))

    def decorate(command: Command) -> Command:
        @wraps(command)
        def run(**given: Any) -> None:
            command(owner(**{each.name: given.pop(each.name) for each in flags}), **given)

        _sign(run, [*_own(command)[1:], *flags, *parameters])
        return run

    return decorate


def _own(command: Command) -> list[inspect.Parameter]:
    """Return the parameters of a command besides its ``**options``."""
    own = inspect.signature(command, eval_str=True).parameters.values()
    return [each for each in own if each.kind is not inspect.Parameter.VAR_KEYWORD]


def _sign(command: Any, parameters: Iterable[inspect.Parameter]) -> None:
    """Give a function the signature that typer reads; of two parameters of a name the first."""
    named: dict[str, inspect.Parameter] = {}
    for each in parameters:
        named.setdefault(each.name, each)
    command.__signature__ = inspect.Signature([*named.values()])
    command.__annotations__ = {name: each.annotation for name, each in named.items()}
