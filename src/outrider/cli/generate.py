"""``outrider generate``: continue a prompt, showing where each token came from."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..errors import NumericalError
from ..types import Counts, Event, Origin, SamplingParams
from .common import SIGNS, Dtype, Model, bars, model_folder, open_llm, write

if TYPE_CHECKING:
    from ..llm import LLM, RequestOutput

COLOURS = {Origin.ACCEPTED: "\x1b[32m", Origin.BONUS: "\x1b[36m", Origin.PLAIN: ""}
RESET = "\x1b[0m"


def read_prompt(argument: str | None, file: Path | None) -> str:
    """The prompt from the one place that has it: argument, file or piped stdin."""
    if argument is not None and file is not None:
        raise typer.BadParameter("give a prompt or --file, not both.")
    if argument is not None:
        return argument
    if file is None and sys.stdin.isatty():
        raise typer.BadParameter("give a prompt, --file FILE, or pipe one in.")
    try:
        data = file.read_bytes() if file else sys.stdin.buffer.read()
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise typer.BadParameter(f"{file or 'stdin'} is not UTF-8 text.") from None
    except OSError as error:
        raise typer.BadParameter(f"{file or 'stdin'} cannot be read: {error.strerror}.") from None


@dataclass
class Screen:
    """Shows samples one after the other: the first as it comes, later ones when it is their turn.

    On a terminal tokens are coloured by origin (unless NO_COLOR is set) and control characters are
    shown as signs; elsewhere the text goes out as it is.
    """

    n: int
    terminal: bool
    colour: bool
    current: int = 0
    waiting: dict[int, list[str]] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)

    @staticmethod
    def of_stdout(n: int) -> Screen:
        terminal = sys.stdout.isatty()
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "") in ("", "dumb")
        return Screen(n, terminal, terminal and not plain)

    def take(self, event: Event) -> None:
        """Show an event, or keep it until the samples before it are done."""
        piece = self._dress(event)
        if event.sample_index == self.current:
            if piece:
                write(piece)
        else:
            self.waiting.setdefault(event.sample_index, []).append(piece)
        if event.finish_reason is not None:
            self.finished.add(event.sample_index)
        while self.current in self.finished and self.current < self.n:
            self._next()

    def _next(self) -> None:
        """End the current sample and show what has come of the next one so far."""
        self.current += 1
        if self.terminal or self.current < self.n:
            write("\n")
        if self.current < self.n:
            write("".join(self.waiting.pop(self.current, [])))

    def _dress(self, event: Event) -> str:
        if not self.terminal:
            return event.text
        text, colour = event.text.translate(SIGNS), COLOURS[event.origin] if self.colour else ""
        return f"{colour}{text}{RESET}" if colour and text else text


@dataclass
class Tally:
    """The figures of a streamed request; the same as ``RequestMetrics``."""

    start: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    counts: Counts = field(default_factory=Counts)

    def take(self, event: Event) -> None:
        if event.token_id is not None:
            self.last = time.perf_counter()
            self.first = self.first or self.last
            self.tokens += 1
        if event.counts is not None:
            self.counts.add(event.counts)

    def lines(self, budget: object) -> Iterable[tuple[str, str, str]]:
        """(name, figure, definition) of everything that ``--stats`` shows."""
        counts = self.counts
        rate, length = counts.acceptance_rate, counts.acceptance_length
        yield "tokens", str(self.tokens), ""
        speed = self.tokens / (self.last - self.start) if self.tokens else 0.0
        yield "tokens/s", f"{speed:.1f}", "tokens / time from the call to the last token"
        ttft = max(0.0, self.first - self.start)
        yield "TTFT", f"{1000 * ttft:.0f} ms", "time to the first token"
        yield "steps", str(counts.steps), "decode steps"
        yield "drafted", str(counts.drafted), "draft tokens verified"
        yield "accepted", str(counts.accepted), ""
        if rate is not None and length is not None:
            survival = counts.acceptance_by_position
            shares = " ".join(f"{share:.2f}" for share in survival)
            yield "acceptance rate", f"{rate:.2f}", "accepted / drafted"
            yield "acceptance length", f"{length:.2f}", "1 + accepted / drafts"
            yield "survival", f"{bars(survival)}  {shares}", "share accepted up to each position"
        yield "budget", str(budget), ""


def show_stats(tally: Tally, budget: object) -> None:
    """Put the figures on stderr, one a line."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for name, figure, definition in tally.lines(budget):
        line = f"[bold]{name:<18}[/bold]{figure}"
        console.print(line + (f"  [dim]({definition})[/dim]" if definition else ""))


def as_json(output: RequestOutput) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "outputs": [asdict(o) for o in output.outputs],
        "metrics": asdict(output.metrics),
    }


def stream(llm: LLM, prompt: str, params: SamplingParams) -> Tally:
    """Generate onto stdout."""
    screen, tally = Screen.of_stdout(params.n), Tally()
    failed: str | None = None
    for _, event in llm.stream(prompt, params):
        tally.take(event)
        screen.take(event)
        failed = failed or event.error
    if failed:
        raise NumericalError(f"the prompt failed: {failed}")
    return tally


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue; else --file or stdin.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", exists=True, dir_okay=False, help="Read the prompt from here."),
    ] = None,
    model: Model = None,
    drafter: Annotated[
        str, typer.Option(help="auto, ngram, none, or a checkpoint's folder.")
    ] = "auto",
    num_speculative_tokens: Annotated[
        int, typer.Option(help="Draft length K: tokens drafted a step.")
    ] = 4,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.")] = 0.7,
    top_k: Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the most likely tokens of this mass.")] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Drop tokens less likely than this times the most likely.")
    ] = 0.0,
    seed: Annotated[
        int | None, typer.Option(help="The same seed gives the same tokens, with any drafter.")
    ] = None,
    n: Annotated[int, typer.Option("--n", help="Samples of the prompt.")] = 1,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 128,
    min_tokens: Annotated[int, typer.Option(help="Tokens before the output may end.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="End at this string; may be given again.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end.")] = False,
    dtype: Dtype = "auto",
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest prompt plus output, in tokens.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="For the cache: bytes, 2GiB, or a share such as 0.5.")
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Show the figures on stderr.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
    """Continue a prompt; accepted tokens are green, the target's own after a draft cyan."""
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, n=n,
        max_tokens=max_tokens, min_tokens=min_tokens, stop=stop, ignore_eos=ignore_eos,
    )  # fmt: skip
    text = read_prompt(prompt, file)
    llm = open_llm(
        model_folder(model), drafter=drafter, num_speculative_tokens=num_speculative_tokens,
        dtype=dtype, max_model_len=max_model_len, memory=memory,
    )  # fmt: skip
    if json_:
        write(json.dumps(as_json(llm.generate(text, params)[0])) + "\n")
        return
    tally = stream(llm, text, params)
    if stats:
        show_stats(tally, llm.engine.budget)
