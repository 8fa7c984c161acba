"""Makes flags of tables: of the engine's options, and of dataclasses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import MISSING, field, fields
from functools import wraps
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from ..base.config import ENGINE_OPTIONS
from ..base.options import Option

Command = TypeVar("Command", bound=Callable[..., None])
COMMON = ("drafter", "num_speculative_tokens", "quantization")
"""Engine options that stand first in the help of a command that has all."""


def flag(option: Option, panel: str | None = None) -> Any:
    """Return the flag of an option, in a panel of the help; its help ends with the default."""
    shown = "" if option.default in (None, False) else f" [{option.default}]"
    names = [option.flag] if option.type is not bool else []
    return typer.Option(
        *names,
        help=option.help + shown,
        show_default=False,
        show_envvar=False,
        rich_help_panel=panel,
    )


def parameter(name: str, of_type: Any, info: Any) -> inspect.Parameter:
    """Return the parameter of a flag, None where it is not given."""
    annotation = Annotated[of_type | None, info]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def with_parameters(parameters: Iterable[inspect.Parameter]) -> Callable[[Command], Command]:
    """Give a command further parameters, which reach its ``**options``; its own stay."""

    def decorate(command: Command) -> Command:
        own = dict(inspect.signature(command, eval_str=True).parameters)
        own.popitem()  # its **options
        _sign(command, [*own.values(), *parameters])
        return command

    return decorate


def _sign(command: Any, parameters: Iterable[inspect.Parameter]) -> None:
    """Give a function the signature that typer reads; of two parameters of a name the first."""
    named: dict[str, inspect.Parameter] = {}
    for each in parameters:
        named.setdefault(each.name, each)
    command.__signature__ = inspect.Signature([*named.values()])
    command.__annotations__ = {name: each.annotation for name, each in named.items()}


def engine_options(*names: str) -> list[inspect.Parameter]:
    """Return the parameters of the engine options of these names, all where there are none."""
    return [
        parameter(o.name, o.type, flag(o, None if o.name in (names or COMMON) else "The engine"))
        for o in ENGINE_OPTIONS
        if o.name in names or not names
    ]


def with_engine_options(*names: str) -> Callable[[Command], Command]:
    """Give a command the engine options of these names, all of them where there are none."""
    return with_parameters(engine_options(*names))


def setting(default: Any, help: str, *names: str, **more: Any) -> Any:
    """Return the field of a class of flags; ``names`` and ``more`` are those of typer's option."""
    return field(default=default, metadata={"names": names, "more": {"help": help, **more}})


def with_flags(
    owner: type[Any], parameters: Iterable[inspect.Parameter] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the fields of a dataclass as flags; it gets an object of the class first.

    The fields stand in the order of their use. ``parameters`` follow them, and reach the command's
    ``**options``.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        hints, flags = get_type_hints(owner, include_extras=True), list[inspect.Parameter]()
        for each in fields(owner):
            kind, info, names = hints[each.name], None, list(each.metadata.get("names", ()))
            if kind is bool and not names:
                names = ["--" + each.name.replace("_", "-")]
            if each.metadata:
                info = typer.Option(*names, **each.metadata["more"])
            flags.append(
                inspect.Parameter(
                    each.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=inspect.Parameter.empty if each.default is MISSING else each.default,
                    annotation=kind if info is None else Annotated[kind, info],
                )
            )

        @wraps(command)
        def run(**given: Any) -> None:
            command(owner(**{each.name: given.pop(each.name) for each in fields(owner)}), **given)

        arguments = [each for each in own if each.kind is not inspect.Parameter.VAR_KEYWORD]
        _sign(run, [*arguments, *flags, *parameters])
        return run

    return decorate
