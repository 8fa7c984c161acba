"""``outrider chat``: a conversation in the terminal."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.homes import cache_home
from ..base.options import options_of
from ..base.types import Event, SamplingParams, Speculation
from ..errors import ConfigError, OutriderError, RequestError, no_option
from ..frontend.presets import TYPED_AT
from ..text.codec import has_lone_surrogates
from ..text.reasoning import ReasoningForm, form_of
from .common import SIGNS, Model, model_folder, open_llm, write
from .flags import engine_options, setting, with_parameters
from .generate import RESET, Screen

if TYPE_CHECKING:
    from ..llm import LLM

HISTORY = "chat_history"
LINES_KEPT = 1000
DIM = "\x1b[2m"
MORE = "\\"
"""At the end of a line: the message goes on in the next one."""
HELP = """\
/system TEXT      set the system prompt; the conversation begins anew
/set NAME VALUE   set a sampling option, drafter or k, as in /set temperature 0.2; /set shows all
/race             give the last answer again without and with drafts, and compare
/retry            answer the last message again
/new              begin anew
/help             show this
/quit             leave (also Ctrl+D); Ctrl+C stops an answer
A message that ends with \\ goes on in the next line.
"""
SETTABLE = {
    option.name: option
    for option in options_of(SamplingParams)
    if option.type in (int, float, bool) and option.name not in ("n", "logprobs")
}
"""Sampling options that ``/set`` takes."""


@dataclass
class Session:
    """A conversation with a model.

    Args:
        llm: the model.
        say: writes text to the terminal.
        dress: returns an event's text as the terminal shows it.
        dim: whether text beside answers may be dimmed.
    """

    llm: LLM
    say: Callable[[str], None]
    dress: Callable[[Event], str]
    dim: bool = False
    params: SamplingParams = field(default_factory=SamplingParams)
    speculation: Speculation = field(default_factory=Speculation)
    messages: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        codec = self.llm.inputs.codec
        if codec is None or not codec.templates:
            raise RequestError(
                f"{self.llm.inputs.folder} has no chat template; continue texts with "
                "outrider generate."
            )
        self.reasoning: ReasoningForm | None = form_of("".join(codec.templates.values()))
        self.asked: list[int] = []
        """The prompt of the last answer."""
        self.seed, self.speed = 0, 0.0
        """Of the last answer."""

    def take(self, line: str) -> bool:
        """Do what a line says: answer it, or follow a command; return False to leave."""
        if not line.strip():
            return True
        try:
            if has_lone_surrogates(line):
                raise RequestError("the input is not UTF-8.")
            if line.startswith("/"):
                return self.command(line)
            self.messages.append({"role": "user", "content": line})
            try:
                self.answer()
            except OutriderError:
                self.messages.pop()  # as if it had not been said
                raise
        except OutriderError as error:
            self.note(f"{error}")
        except ValueError as error:  # of shlex
            self.note(f"the command cannot be read: {error}.")
        return True

    def note(self, text: str) -> None:
        """Say something that is no answer."""
        shown = text.translate(SIGNS)
        self.say(f"{DIM}{shown}{RESET}\n" if self.dim else f"{shown}\n")

    def command(self, line: str) -> bool:
        """Follow a command; return False to leave."""
        name, _, rest = line[1:].partition(" ")
        rest = rest.strip()
        if name in ("quit", "exit", "bye"):
            return False
        if name == "help":
            self.note(HELP.rstrip())
        elif name == "new":
            self.begin()
        elif name == "system":
            self.begin(rest)
        elif name == "set":
            self.set(rest)
        elif name == "retry":
            self.retry()
        elif name == "race":
            self.race()
        else:
            raise RequestError(f"there is no command /{name}; /help lists all.")
        return True

    def begin(self, system: str | None = None) -> None:
        """Begin anew, with the system prompt there was, or another; an empty text drops it."""
        before = [m for m in self.messages[:1] if m["role"] == "system"]
        own = before if system is None else [{"role": "system", "content": system}]
        self.messages = [m for m in own if m["content"]]
        self.asked = []
        self.note("a new conversation")

    def set(self, rest: str) -> None:
        """Set an option, or show them all."""
        words = shlex.split(rest)
        if not words:
            self.note(self.options())
            return
        if len(words) != 2:
            raise RequestError("give a name and a value, as in /set temperature 0.2.")
        name, text = words[0].replace("-", "_"), words[1]
        how = self.speculation
        if name == "drafter":
            drafter = None if text == "none" else text
            changed = replace(how, enabled=drafter is not None, drafter=drafter)
            self.llm.engine.menu.check(changed)
            self.speculation = changed
        elif name in ("k", "num_speculative_tokens"):
            self.speculation = replace(how, num_speculative_tokens=self._value(name, text, int))
        elif name in SETTABLE:
            kind = SETTABLE[name].type
            self.params = replace(self.params, **{name: self._value(name, text, kind)})
        else:
            raise no_option("/set", name, [*SETTABLE, "drafter", "k"])

    @staticmethod
    def _value(name: str, text: str, kind: type) -> Any:
        """Return a value of a kind from its text, None for none."""
        if text in ("none", "default"):
            return None
        switches = {"true": True, "on": True, "false": False, "off": False}
        try:
            return switches[text.lower()] if kind is bool else kind(text)
        except (KeyError, ValueError):
            expected = SETTABLE[name].expected if name in SETTABLE else "a whole number, or none"
            raise ConfigError(f"{name} is {text!r}; give {expected}.") from None

    def options(self) -> str:
        """Return the options that differ from the usual ones, and those that matter most."""
        shown = {name: getattr(self.params, name) for name in SETTABLE}
        usual = SamplingParams()
        often = ("temperature", "max_tokens", "seed")
        lines = [f"{n} {v}" for n, v in shown.items() if n in often or v != getattr(usual, n)]
        how = self.speculation
        drafter = (how.drafter or self.llm.speculation.drafter) if how.enabled else "none"
        return "\n".join([*lines, f"drafter {drafter}", f"k {how.num_speculative_tokens}"])

    def retry(self) -> None:
        """Answer the last message again."""
        while self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if not self.messages or self.messages[-1]["role"] != "user":
            raise RequestError("there is no message to answer; write one.")
        self.answer()

    def answer(self) -> None:
        """Answer the conversation, and keep what was said."""
        inputs = self.llm.inputs
        text = inputs.render(self.messages)
        asked = inputs.encode(text, special=False, rendered=True)
        said, figures = self.stream(asked, self.speculation)
        self.asked = asked
        begun = self.reasoning is not None and self.reasoning.begun(text)
        parts = None if self.reasoning is None else self.reasoning.parts(said, begun, True)
        message = {"role": "assistant", "content": said if parts is None else parts.answer}
        if parts is not None and parts.thoughts:
            message["reasoning"] = parts.thoughts
        self.messages.append(message)
        self.note(figures)

    def stream(
        self, asked: list[int], how: Speculation, seed: int | None = None
    ) -> tuple[str, str]:
        """Show an answer to a prompt as it comes; return its text and a line of figures.

        Ctrl+C ends it with what there is.
        """
        left = self.llm.inputs.room_after(asked)
        most = self.params.max_tokens
        params = replace(self.params, max_tokens=left if most is None else min(most, left))
        if seed is not None:
            params = replace(params, seed=seed)
        if self.reasoning is not None and self.reasoning.marks & {
            *self.llm.inputs.outputs.special_tokens
        }:
            params = replace(params, skip_special_tokens=False)
        (state,) = self.llm.start({"prompt_token_ids": asked}, params, speculation=how)
        self.seed = state.request.seed
        stopped = False
        try:
            for event in self.llm.run([state]):
                self.say(self.dress(event))
        except KeyboardInterrupt:
            stopped = True
        sample, metrics = state.samples[0], state.output().metrics
        self.say("" if sample.text.endswith("\n") else "\n")
        if state.error:
            raise RequestError(f"the answer failed: {state.error}")
        parts = [
            "stopped" if stopped else "",
            f"{len(sample.token_ids)} tokens", f"{metrics.tokens_per_second:.0f} tokens/s",
            f"first token {1000 * metrics.ttft:.0f} ms",
        ]  # fmt: skip
        if metrics.acceptance_length is not None:
            parts.append(f"acceptance length {metrics.acceptance_length:.2f}")
        if sample.finish_reason == "length":
            cut = most is not None and most < left
            parts.append("cut off by max_tokens" if cut else "the context is full: /new")
        self.speed = metrics.tokens_per_second
        return sample.text, " · ".join(filter(None, parts))

    def race(self) -> None:
        """Give the last answer again, without drafts and with them, of one seed."""
        if not self.asked:
            raise RequestError("there is no answer to race with; write a message first.")
        seed, texts, speeds = self.seed, list[str](), list[float]()
        for name, how in (
            ("without drafts", replace(self.speculation, enabled=False)),
            ("with drafts", replace(self.speculation, enabled=True)),
        ):
            self.note(f"{name}:")
            text, figures = self.stream(self.asked, how, seed)
            self.note(figures)
            texts.append(text)
            speeds.append(self.speed)
        same = "identical: yes" if texts[0] == texts[1] else "identical: no"
        self.note(f"{same} · {speeds[1] / speeds[0]:.2f}x the speed with drafts")


def lines_of(source: Iterable[str]) -> Iterator[str]:
    """Yield messages from lines, some of which go on in the next one."""
    held: list[str] = []
    for line in source:
        text = line.rstrip("\n")
        if text.endswith(MORE):
            held.append(text.removesuffix(MORE))
            continue
        yield "\n".join([*held, text])
        held.clear()
    if held:
        yield "\n".join(held)


def typed(prompt: str) -> Iterator[str]:
    """Yield lines that are typed, with a history in the user's cache folder; Ctrl+C drops one."""
    file = cache_home() / HISTORY
    with suppress(ImportError):
        import readline

        readline.set_history_length(LINES_KEPT)
        with suppress(OSError):
            readline.read_history_file(file)
    try:
        while True:
            try:
                yield input(prompt)
            except KeyboardInterrupt:
                write("\n")
            except EOFError:
                write("\n")
                return
    finally:
        with suppress(ImportError, OSError):
            import readline

            file.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(file)
            file.chmod(0o600)


@with_parameters(engine_options())
def chat(
    model: Model = None,
    system: str | None = setting(None, "The system prompt.", metavar="TEXT"),
    temperature: float | None = setting(
        None, "Sampling temperature; the model's own unless given."
    ),
    max_tokens: int | None = setting(None, "Most tokens of an answer; what the context holds."),
    seed: int | None = setting(None, "The seed of every answer; another each unless given."),
    **options: Any,
) -> None:
    """Chat with a model; accepted tokens are green, the target's own after a draft cyan.

    /help lists commands. Without a terminal each line of stdin is a message.
    """
    given = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
    own: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    SamplingParams(**own)  # a wrong one is told before the model is loaded
    llm = open_llm(model_folder(model), **options)
    screen = Screen.of_stdout()
    params = SamplingParams(**{**TYPED_AT, "max_tokens": None, **llm.inputs.defaults, **own})
    messages = [{"role": "system", "content": system}] if system else []
    session = Session(llm, write, screen.dress, screen.colour, params, messages=messages)
    if sys.stdin.isatty():
        name = Path(str(llm.inputs.folder)).name
        session.note(f"{name}, {session.options().replace(chr(10), ', ')}; /help lists commands")
        source: Iterable[str] = typed(">>> ")
    else:
        source = sys.stdin
    for message in lines_of(source):
        if not session.take(message):
            break
