"""``outrider generate``: continue a prompt, showing where each token came from."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text

from ..base.config import ENGINE_OPTIONS, POCKET
from ..base.options import options_of
from ..base.types import Event, Origin, SamplingParams
from ..errors import NumericalError
from ..frontend.instruct import is_instruct
from ..frontend.presets import TYPED_AT
from .common import (
    SIGNS,
    AsJson,
    Model,
    bars,
    model_folder,
    open_llm,
    read_text,
    screen,
    shares,
    write,
)
from .flags import COMMON, argument, parameter, sampling, setting, with_parameters
from .spelling import hint

if TYPE_CHECKING:
    from ..frontend.inputs import Prompt
    from ..frontend.outputs import RequestOutput, RequestState
    from ..llm import LLM

COLOURS = {Origin.ACCEPTED: "\x1b[32m", Origin.BONUS: "\x1b[36m", Origin.PLAIN: ""}
RESET = "\x1b[0m"
LONGEST_NAME = 4096
USUAL: dict[str, Any] = {**TYPED_AT, "max_tokens": 128}
"""Defaults of this command that are not those of ``SamplingParams``."""
SAMPLED = {
    o.name: replace(o, default=USUAL.get(o.name, o.default)) for o in options_of(SamplingParams)
}
FIRST = ("temperature", "max_tokens", "seed", "n", *COMMON)
"""Options that stand first in the help."""


def arguments(model: str | None, text: str | None, prompt: bool) -> tuple[str | None, str | None]:
    """Return model and prompt; one argument alone is the prompt unless an option has ``prompt``."""
    if text is None and model is not None and not prompt and not names_model(model):
        model, text = None, model
    if text is not None:
        hint("give the prompt as --prompt TEXT; the argument is the model.")
    return model, text


def names_model(text: str) -> bool:
    """Return whether a text reads as a model's name: the pocket pair, a path, or a hub name."""
    path = re.fullmatch(r"\S*/\S*|\S+\.gguf", text) is not None
    return path or text == POCKET or (text != "" and os.path.exists(text))


def read_prompt(given: str | None, file: Path | None) -> str:
    """Return the prompt from the one place that has it: --prompt, file or piped stdin."""
    if given is not None and file is not None:
        raise typer.BadParameter("give --prompt or --file, not both.")
    if given is not None:
        return given
    if file is None and sys.stdin.isatty():
        raise typer.BadParameter("give --prompt TEXT, --file FILE, or pipe one in.")
    return read_text(file, str(file or "stdin"))


def text_or_file(value: str | None) -> str | None:
    """Return the text itself, or the content of the file of that name."""
    # No schema, expression or grammar of more than a line is the name of a file.
    if value is None or "\n" in value or not Path(value[:LONGEST_NAME]).is_file():
        return value
    return read_text(Path(value), value)


def read_form(
    schema: str | None, regex: str | None, grammar: str | None, choice: list[str] | None
) -> dict[str, Any] | None:
    """Return the form of the output for ``SamplingParams``, None for any."""
    texts = {"json": text_or_file(schema), "regex": regex, "grammar": text_or_file(grammar)}
    forms: dict[str, Any] = {**texts, "choice": choice or None}
    form = {name: value for name, value in forms.items() if value is not None}
    if len(form) > 1:
        raise typer.BadParameter("give one of --json-schema, --regex, --grammar and --choice.")
    return form or None


def read_bias(texts: list[str] | None) -> dict[int, float] | None:
    """Return the biases of token ids, from "ID=BIAS"."""
    biases = {}
    for text in texts or []:
        name, _, value = text.partition("=")
        try:
            biases[int(name)] = float(value)
        except ValueError:
            raise typer.BadParameter(f"--logit-bias is {text!r}; give ID=BIAS, as 42=-3.") from None
    return biases or None


@dataclass
class Screen:
    """Shows samples one after the other: the first as it comes, later ones when it is their turn.

    On a terminal tokens are coloured by origin (unless NO_COLOR is set) and control characters are
    shown as signs; elsewhere the text goes out as it is. A newline follows each sample.
    """

    terminal: bool
    colour: bool
    current: int = 0
    waiting: dict[int, list[str]] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)

    @staticmethod
    def of_stdout() -> Screen:
        terminal = sys.stdout.isatty()
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "") in ("", "dumb")
        return Screen(terminal, terminal and not plain)

    def take(self, event: Event) -> None:
        """Show an event, or keep it until the samples before it are done."""
        self.waiting.setdefault(event.sample_index, []).append(self.dress(event))
        if event.finish_reason is not None:
            self.finished.add(event.sample_index)
        write("".join(self.waiting.pop(self.current, [])))
        while self.current in self.finished:
            self.current += 1
            write("\n" + "".join(self.waiting.pop(self.current, [])))

    def dress(self, event: Event) -> str:
        """Return the text of an event as it is shown."""
        if not self.terminal:
            return event.text
        text, colour = event.text.translate(SIGNS), COLOURS[event.origin] if self.colour else ""
        return f"{colour}{text}{RESET}" if colour and text else text


def figures(state: RequestState, budget: object) -> list[tuple[str, str, str]]:
    """Return (name, figure, definition) of everything that ``--stats`` shows."""
    metrics = state.output().metrics
    survival = metrics.acceptance_by_position
    rows = [
        ("tokens", str(sum(len(sample.token_ids) for sample in state.samples)), ""),
        ("tokens/s", f"{metrics.tokens_per_second:.1f}",
         "tokens / time from the call to the last token"),
        ("TTFT", f"{1000 * metrics.ttft:.0f} ms", "time to the first token"),
        ("steps", str(metrics.steps), "decode steps"),
        ("drafted", str(metrics.drafted), "draft tokens verified"),
        ("accepted", str(metrics.accepted), ""),
    ]  # fmt: skip
    if metrics.acceptance_rate is not None:
        rows += [
            ("acceptance rate", f"{metrics.acceptance_rate:.2f}", "accepted / drafted"),
            ("acceptance length", f"{metrics.acceptance_length:.2f}", "1 + accepted / drafts"),
            ("survival", f"{bars(survival)}  {shares(survival)}",
             "share accepted up to each position"),
        ]  # fmt: skip
    return [*rows, ("budget", str(budget), "")]


def show_stats(state: RequestState, budget: object) -> None:
    """Put the figures on stderr, one a line."""
    console = screen(on_stderr=True, soft_wrap=True)
    for name, figure, definition in figures(state, budget):
        shown = f"  ({definition})" if definition else ""
        console.print(Text.assemble((f"{name:<18}", "bold"), figure, (shown, "dim")))


def as_json(output: RequestOutput) -> dict[str, Any]:
    """Return the object that ``--json`` prints."""
    return {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "outputs": [asdict(o) for o in output.outputs],
        "metrics": asdict(output.metrics),
    }


def asked_of(llm: LLM, text: str, raw: bool) -> Prompt:
    """Return what a prompt asks of a model: one that chats gets it as a user's message."""
    codec = llm.inputs.codec
    if raw or codec is None or not is_instruct(llm.inputs.folder, codec):
        return text
    if sys.stderr.isatty():
        hint("the chat template is applied; --raw continues the text as it is.")
    return codec.chat([{"role": "user", "content": text}])


def stream(llm: LLM, prompt: Prompt, params: SamplingParams) -> RequestState:
    """Print the output as it is generated; return the request's state at its end."""
    screen = Screen.of_stdout()
    (state,) = llm.start(prompt, params)
    for event in llm.run([state]):
        if event.error is None or screen.terminal:
            screen.take(event)
    if state.error:
        raise NumericalError(f"the prompt failed: {state.error}")
    return state


@with_parameters(
    parameter(o, None if o.name in FIRST else panel)
    for panel, table in (("Sampling", SAMPLED.values()), ("The engine", ENGINE_OPTIONS))
    for o in table
)
def generate(
    model: Model = None,
    text: str | None = argument("TEXT", "", None, hidden=True),
    prompt: str | None = setting(
        None, "The text to continue; else --file or stdin.", metavar="TEXT"
    ),
    file: Path | None = setting(None, "Read the prompt from here.", exists=True, dir_okay=False),
    logit_bias: list[str] | None = sampling(
        "Added to a token's logit; may be given again.", metavar="ID=BIAS"
    ),
    bad_words: list[str] | None = sampling("Never say this; may be given again."),
    json_schema: str | None = sampling("Make the output JSON of this schema.", metavar="TEXT|FILE"),
    regex: str | None = sampling("Make the output match this expression."),
    grammar: str | None = sampling("Make the output follow it: Lark or GBNF.", metavar="TEXT|FILE"),
    choice: list[str] | None = sampling("Make the output one of these; give it again."),
    stop: list[str] | None = setting(None, "End at this string; may be given again."),
    raw: bool = setting(
        False,
        "Continue the text as it is, without the chat template of a model that chats.",
        "--raw",
    ),
    stats: bool = setting(False, "Show the figures on stderr.", "--stats"),
    json_: AsJson = False,
    **options: Any,
) -> None:
    """Continue a prompt; accepted tokens are green, the target's own after a draft cyan."""
    drawn = {name: options.pop(name) for name in SAMPLED}
    if drawn["logprobs"] is not None and not json_:
        raise typer.BadParameter("--logprobs needs --json.")
    given = {name: value for name, value in drawn.items() if value is not None}
    params = SamplingParams(
        **{**USUAL, **given}, stop=stop, logit_bias=read_bias(logit_bias), bad_words=bad_words,
        structured_outputs=read_form(json_schema, regex, grammar, choice),
    )  # fmt: skip
    model, text = arguments(model, text, prompt is not None or file is not None)
    if text is not None and prompt is not None:
        raise typer.BadParameter("give one prompt.")
    text = read_prompt(text if prompt is None else prompt, file)
    llm = open_llm(model_folder(model), **options)
    usual = {**USUAL, **llm.inputs.defaults}
    usual["max_tokens"] = min(usual["max_tokens"], llm.engine.max_model_len)
    params = replace(params, **{n: value for n, value in usual.items() if n not in given})
    asked = asked_of(llm, text, raw)
    if json_:
        output = replace(llm.generate(asked, params)[0], prompt=text)
        write(json.dumps(as_json(output)) + "\n")
        return
    state = stream(llm, asked, params)
    if stats:
        show_stats(state, llm.engine.budget)
