"""``outrider serve`` and ``outrider config``."""

from __future__ import annotations

import inspect
import json
import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ..config import OLD_NAMES
from ..errors import OutriderError
from ..server.options import BY_NAME, KINDS, OPTIONS, SECRET, Chosen, config_file, resolve
from .common import exit_code, model_folder, write

PARAMETERS = tuple(
    inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            KINDS[option.kind] | None,
            typer.Option(
                *([option.flag] if option.kind != "switch" else []),
                help=option.help
                + ("" if option.default in (None, False) else rf" \[{option.default}]"),
                show_default=False,
                show_envvar=False,
            ),
        ],
    )
    for option in OPTIONS
) + tuple(
    inspect.Parameter(
        old,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            KINDS[BY_NAME[today].kind] | None,
            typer.Option("--" + old.replace("_", "-"), hidden=True, show_envvar=False),
        ],
    )
    for old, today in OLD_NAMES.items()
)


def with_options(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command every option of a server; those not given are None."""
    own = inspect.signature(function, eval_str=True).parameters.values()
    shown = [p for p in own if p.kind is not inspect.Parameter.VAR_KEYWORD]
    function.__signature__ = inspect.Signature([*shown, *PARAMETERS])  # type: ignore[attr-defined]
    function.__annotations__ = {p.name: p.annotation for p in (*shown, *PARAMETERS)}
    return function


Target = Annotated[
    str | None,
    typer.Argument(help="The target; the bundled pocket pair unless given.", show_default=False),
]
File = Annotated[
    str | None,
    typer.Option("--config", metavar="FILE", help="A TOML file with options, see outrider config."),
]


def chosen(
    model: str | None, config: str | None, flags: dict[str, Any]
) -> tuple[str | None, dict[str, Chosen]]:
    """The model and what else is in force."""
    found = resolve(flags, os.environ, config_file(config))
    named = found.pop("model", None)
    return (named.value if model is None and named else model), found


@with_options
def serve(model: Target = None, config: File = None, **flags: Any) -> None:
    """Serve a model to clients of OpenAI and vLLM.

    Options come from a TOML file, the environment (OUTRIDER_PORT=8001) and flags; the later win.
    """
    from ..engine.stderr import guard

    guard()
    with warnings.catch_warnings(record=True) as early:
        name, found = chosen(model, config, flags)
    from ..server.build import build, choice
    from ..server.log import FORMATS, LEVELS, announce, configure, logger
    from ..server.run import Server

    log = {name: found[name].value for name in ("log_format", "log_level")}
    configure(choice(log, "log_format", FORMATS), choice(log, "log_level", LEVELS))
    for one in early:
        warnings.showwarning(one.message, one.category, one.filename, one.lineno)
    as_json = log["log_format"] == "json"
    say = announce if as_json else partial(typer.echo, err=True)
    try:
        llm, settings = build(model_folder(name), Path(name).name if name else "pocket", found)
        error = Server(llm, settings, settings.host, found["port"].value, say).run()
        if error is not None:
            raise error
    except OutriderError as error:
        if not as_json:
            raise
        logger.error("%s", error)
        raise typer.Exit(exit_code(error)) from None


@with_options
def config(
    model: Target = None,
    config: File = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    **flags: Any,
) -> None:
    """Show the options that a server would have, and where each comes from."""
    name, found = chosen(model, config, flags)
    rows = {"model": Chosen(name, "argument" if model else "default"), **found}
    shown = {n: "***" if n in SECRET and c.value else c.value for n, c in rows.items()}
    if json_:
        listed = {n: {"value": shown[n], "source": c.source} for n, c in rows.items()}
        write(json.dumps(listed, indent=1) + "\n")
        return
    wide, long = max(map(len, rows)), max(len(toml(v)) for v in shown.values())
    for n, c in rows.items():
        write(f"{n:{wide}} = {toml(shown[n]):{long}}  # {c.source}\n")


def toml(value: Any) -> str:
    """A value as TOML has it; what is not set is an empty text."""
    return json.dumps("" if value is None else value)
