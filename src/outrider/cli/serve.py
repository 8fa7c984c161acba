"""``outrider serve`` and ``outrider config``."""

import os
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ..base.vllm_names import DEPRECATED
from ..errors import OutriderError
from ..server.options import (
    BY_NAME,
    OPTIONS,
    SECRET,
    SERVER_OPTIONS,
    Setting,
    config_file,
    resolve,
    toml,
)
from .commands import exit_code
from .common import AsJson, model_folder, write, write_json
from .flags import COMMON, parameter, with_parameters

FIRST = (
    *COMMON, "host", "port", "api_key", "served_model_name", "dtype", "max_model_len",
    "max_num_seqs", "memory",
)  # fmt: skip
"""Options that stand first in the help."""


def panel(name: str) -> str | None:
    """Return the panel of an option in the help."""
    of_server = any(option.name == name for option in SERVER_OPTIONS)
    return None if name in FIRST else "The server" if of_server else "The engine"


PARAMETERS = (
    *(parameter(option, panel(option.name)) for option in OPTIONS),
    *(parameter(replace(BY_NAME[now], name=old), hidden=True) for old, now in DEPRECATED.items()),
)
"""Every option of a server; None where it is not given."""

Target = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="The target, or a head that names it; the bundled pocket pair unless given.",
        show_default=False,
    ),
]
File = Annotated[
    str | None,
    typer.Option("--config", metavar="FILE", help="A TOML file with options, see outrider config."),
]


def resolved(
    model: str | None, config: str | None, flags: dict[str, Any]
) -> tuple[str | None, dict[str, Setting]]:
    """Return the model and the options in force."""
    options = resolve(flags, os.environ, config_file(config))
    named = options.pop("model", None)
    return (named.value if model is None and named else model), options


@with_parameters(PARAMETERS)
def serve(model: Target = None, config: File = None, **flags: Any) -> None:
    """Serve a model over the APIs of OpenAI and vLLM.

    Options come from a TOML file, the environment (OUTRIDER_PORT=8001) and flags; the later win.
    """
    from ..base.stderr import guard
    from ..engine.worker.process import early_worker

    guard()
    with early_worker():
        _serve(model, config, flags)


def _serve(model: str | None, config: str | None, flags: dict[str, Any]) -> None:
    with warnings.catch_warnings(record=True) as early:
        name, options = resolved(model, config, flags)
    from ..server.build import build, choice
    from ..server.log import FORMATS, LEVELS, announce, configure, logger

    log = {name: options[name].value for name in ("log_format", "log_level")}
    configure(choice(log, "log_format", FORMATS), choice(log, "log_level", LEVELS))
    for one in early:
        warnings.showwarning(one.message, one.category, one.filename, one.lineno)
    as_json = log["log_format"] == "json"
    say = announce if as_json else partial(typer.echo, err=True)
    try:
        llm, settings = build(model_folder(name), Path(name).name if name else "pocket", options)
        from ..server.run import Server  # while the engine loads

        error = Server(llm, settings, settings.host, options["port"].value, say).run()
        if error is not None:
            raise error
    except OutriderError as error:
        if not as_json:
            raise
        logger.error("%s", error)
        raise typer.Exit(exit_code(error)) from None


@with_parameters(PARAMETERS)
def config(model: Target = None, config: File = None, json_: AsJson = False, **flags: Any) -> None:
    """Show a server's options and the source of each."""
    name, options = resolved(model, config, flags)
    rows = {"model": Setting(name, "argument" if model else "default"), **options}
    shown = {n: "***" if n in SECRET and c.value else c.value for n, c in rows.items()}
    if json_:
        write_json({n: {"value": shown[n], "source": c.source} for n, c in rows.items()}, "-")
        return
    wide, long = max(map(len, rows)), max(len(toml(v)) for v in shown.values())
    for n, c in rows.items():
        write(f"{n:{wide}} = {toml(shown[n]):{long}}  # {c.source}\n")
