"""Parts that commands share: flags, exit codes, and the display of errors and warnings."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..base.kept import naming
from ..errors import ConfigError

if TYPE_CHECKING:
    from ..llm import LLM

WIDE = 160

# A terminal would obey control characters: all but newline and tab are shown as signs instead, and
# so are lone surrogates, which a file's name may have and UTF-8 has not.
SIGNS = {
    **{i: 0x2400 + i for i in range(32) if i not in (9, 10)},
    127: 0x2421,
    **dict.fromkeys((*range(0x80, 0xA0), *range(0xD800, 0xE000)), 0xFFFD),
}

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="The target: a checkpoint's folder, .gguf file or hub name. "
        "The bundled pocket pair unless given.",
    ),
]
Files = TypeVar("Files", str | None, list[str] | None)


def writable(param: typer.CallbackParam, files: Files) -> Files:
    """Return a file or several, refused if one could not be written after all the work."""
    for file in [files] if isinstance(files, str) else files or ():
        path = Path(file)
        try:
            if path.is_file() or path.is_dir():
                path.open("ab").close()
            elif file != "-" and not path.exists():
                TemporaryFile(dir=path.absolute().parent).close()
        except OSError as error:
            said = f"{param.opts[0]} {file} cannot be written: {error.strerror}."
            raise typer.BadParameter(said) from None
    return files


def png(param: typer.CallbackParam, file: str | None) -> str | None:
    """Return ``file``, refused unless it can be written and is named as a PNG."""
    if file is not None and Path(file).suffix.lower() != ".png":
        raise typer.BadParameter(f"{param.opts[0]} is {file!r}; give a file that ends in .png.")
    return writable(param, file)


AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, for programs.")]
Out = Annotated[
    str | None,
    typer.Option(
        "--out", "-o", metavar="FILE", callback=writable, help="Write the report here, as JSON."
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(envvar="OUTRIDER_API_KEY", metavar="KEY", help="The API key of the servers."),
]
LEAST_ROUNDS = 7
"""Rounds from which on a median's interval is worth reporting."""
Rounds = Annotated[int, typer.Option("--rounds", min=LEAST_ROUNDS, help="Interleaved rounds.")]
Advised = Annotated[
    Path | None,
    typer.Option(
        "--advice", metavar="FILE", help="What outrider ops advise --out wrote.", show_default=False
    ),
]
"""The option of commands that read an advice."""


def read_text(file: Path | None, name: str) -> str:
    """Return the text of a file, of stdin where it is None; ``name`` is for messages."""
    try:
        return (file.read_bytes() if file else sys.stdin.buffer.read()).decode("utf-8")
    except UnicodeDecodeError:
        raise typer.BadParameter(f"{name} is not UTF-8 text.") from None
    except OSError as error:
        raise typer.BadParameter(f"{name} cannot be read: {error.strerror}.") from None


def numbers(text: str, kind: type[int] | type[float], option: str) -> tuple[Any, ...]:
    """Return a comma list as numbers, without repetition."""
    try:
        return tuple(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError:
        said = f"{option} is {text!r}; give comma-separated numbers."
        raise typer.BadParameter(said) from None


def shapes(text: str) -> list[tuple[int, int]]:
    """Return nodes and depth of trees that are written NODES:DEPTH, with commas."""
    trees: list[tuple[int, int]] = []
    for part in text.split(","):
        nodes, _, depth = part.partition(":")
        if not (nodes.isdecimal() and depth.isdecimal() and 0 < int(depth) < int(nodes)):
            raise ConfigError(f"--trees has {part!r}; give NODES:DEPTH with more nodes than depth.")
        trees.append((int(nodes), int(depth)))
    return trees


def write_json(report: Any, file: str | None) -> None:
    """Write a report to ``file``; "-" is stdout, None nowhere."""
    text = json.dumps(report, indent=1) + "\n"
    if file == "-":
        write(text)
    elif file is not None:
        with naming(Path(file)):
            Path(file).write_text(text, encoding="utf-8")


def write_report(report: Any, as_json: bool, out: str | None) -> None:
    """Write a report as JSON: to the file of ``--out``, and to stdout with ``--json``."""
    write_json(report, out)
    write_json(report, "-" if as_json else None)


def write(text: str) -> None:
    """Write ``text`` to stdout at once, in UTF-8 under any locale."""
    typer.echo(text.encode("utf-8", "replace"), nl=False)


EVERY = 15.0
"""Seconds between two progress lines of a long command if stderr is not a terminal."""


def now_and_then() -> Callable[[str], None]:
    """Return a function that prints a progress line on stderr, at most one in ``EVERY`` seconds."""
    last = time.monotonic()

    def tell(text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= EVERY:
            last = time.monotonic()
            typer.echo(text, err=True)

    return tell


@contextmanager
def counted(what: str) -> Iterator[Callable[..., None]]:
    """Show a bar on stderr, lines where that is no terminal; yield ``told(done, total, what)``.

    It is drawn between runs only: a drawing thread would disturb the timing.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = screen(on_stderr=True)
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        console=console, transient=True, disable=not console.is_terminal, auto_refresh=False,
    ) as bar:  # fmt: skip
        task, tell = bar.add_task(what, total=None), now_and_then()

        def told(done: int, total: int, what: str = what) -> None:
            bar.update(task, description=what, completed=done, total=total, refresh=True)
            if not console.is_terminal:
                tell(f"{what}: {done} of {total}")

        yield told


@contextmanager
def lines(text: str) -> Iterator[Callable[[str], None]]:
    """Print a text on stderr every ``EVERY`` seconds, unless it is a terminal; yield its setter."""
    doing, done = [text], threading.Event()

    def repeat() -> None:
        while not done.wait(EVERY):
            typer.echo(f"{doing[-1]} ...", err=True)

    thread = threading.Thread(target=repeat, daemon=True)
    if not sys.stderr.isatty():
        thread.start()
    try:
        yield doing.append
    finally:
        done.set()
        if thread.is_alive():
            thread.join()


@contextmanager
def on_sigterm(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Have SIGTERM call ``handler`` meanwhile."""
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def ended_cleanly() -> AbstractContextManager[None]:
    """Turn SIGTERM into an exception, so that partial output is removed."""
    return on_sigterm(lambda number, _: sys.exit(128 + number))


@contextmanager
def status(text: str) -> Iterator[None]:
    """Show on stderr what the command does, in a still line; nothing where that is no terminal."""
    shown = sys.stderr.isatty()
    if shown:
        typer.echo(f"{text} ...", err=True, nl=False)
    try:
        yield
    finally:
        if shown:
            typer.echo("\r\x1b[2K", err=True, nl=False, color=True)


@contextmanager
def telling(text: str) -> Iterator[Callable[[str], None]]:
    """Show on stderr what the command does, and yield a function that changes the text."""
    console = screen(on_stderr=True)
    if not console.is_terminal:
        with lines(text) as tell:
            yield tell
        return
    with console.status(Text(text)) as shown:
        yield lambda news: shown.update(Text(news.translate(SIGNS)))


def open_llm(model: str | Path, **options: Any) -> LLM:
    """Return a loaded model; options that are None take their defaults."""
    with status("loading the model"):
        from ..llm import LLM

        return LLM(model, **{name: value for name, value in options.items() if value is not None})


def model_folder(model: str | None) -> str | Path:
    """Return the model to use: the pocket pair unless one is given."""
    from .. import pocket

    return pocket.PATH if model is None else model


def program() -> str:
    """Return the command that starts this program."""
    if shutil.which("outrider"):
        return "outrider"
    return sys.argv[0] if Path(sys.argv[0]).name == "outrider" else "python -m outrider"


class _Screen(Console):
    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(text.translate(SIGNS), **options)


def screen(on_stderr: bool = False, **options: Any) -> Console:
    """Return a console that shows text as it is, without markup in brackets and emoji codes."""
    return _Screen(stderr=on_stderr, markup=False, emoji=False, highlight=False, **options)


def report_console(on_stderr: bool) -> Console:
    """Return the console of a table, wide where that is no terminal."""
    return screen(on_stderr, width=None if screen(on_stderr).is_terminal else WIDE)


def new_table(
    *left: str, right: Iterable[str] = (), caption: str | None = None, title: str | None = None
) -> Table:
    """Return a table of columns whose long words are folded, and behind them of figures."""
    table = Table(
        title=title, title_justify="left", caption=caption, caption_justify="left", box=SIMPLE,
        show_edge=False, pad_edge=False, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right")
    return table


def shares(survival: list[float]) -> str:
    """Return survival by position in figures."""
    return " ".join(f"{share:.2f}" for share in survival)


def bars(survival: list[float]) -> str:
    """Return survival by position as a picture: a block of an eighth to eight eighths each."""
    return "".join(" ▁▂▃▄▅▆▇█"[round(8 * share)] for share in survival)
