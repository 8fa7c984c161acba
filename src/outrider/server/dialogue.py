"""The common part of calls that answer a conversation: chats, responses and messages."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from fastapi import Request as HttpRequest

from ..base.limits import LARGEST_INT
from ..errors import RequestError, shown
from ..frontend.outputs import SampleState
from ..text.called import ToolCall, new_id, types_of
from ..text.calls import MARKS
from ..text.messages import readable
from .api_call import ApiCall
from .errors import Refusal
from .protocol import ChatRequest
from .reader import Reader, Said
from .record import of_messages
from .service import Service
from .tools import choice_of, constraint

NOT_BOUNDED = "this model's thinking cannot be limited; leave it out."


class CallNews(NamedTuple):
    """The new part of call ``number``: all of it at first, then more arguments.

    ``id`` is what clients know the call by.
    """

    number: int
    call: ToolCall
    id: str
    arguments: str
    first: bool


class News(NamedTuple):
    """The part of a sample that a step adds for a client."""

    thoughts: str
    content: str
    calls: list[CallNews]


@dataclass
class Seen:
    """The part of a sample that a client has seen: characters of its texts, and calls."""

    thoughts: int = 0
    content: int = 0
    calls: list[ToolCall] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)

    def news(self, said: Said) -> News:
        """Return what is new in ``said``, and mark it as seen."""
        thoughts, content = said.thoughts[self.thoughts :], said.content[self.content :]
        self.thoughts += len(thoughts)
        self.content += len(content)
        return News(thoughts, content, self._calls(said.calls))

    def _calls(self, calls: list[ToolCall]) -> list[CallNews]:
        news = []
        for n, call in enumerate(calls):
            if n == len(self.calls):
                self.calls.append(call)
                self.ids.append(new_id())
                news.append(CallNews(n, call, self.ids[n], call.arguments, True))
            elif len(call.arguments) > len(self.calls[n].arguments):
                more = call.arguments[len(self.calls[n].arguments) :]
                self.calls[n] = call
                news.append(CallNews(n, call, self.ids[n], more, False))
        return news


class Dialogue(ApiCall[ChatRequest]):
    """A call that answers a conversation: its messages, and the form of the answer.

    Attributes:
        names: the client's names of fields, keyed by those of ``SamplingParams``.
        choice: which tools may be called, see ``tools.choice_of``.
        reader: parses the outputs.
        repeated: how many such calls one body asks for.
    """

    repeated = 1
    names: Mapping[str, str] = MappingProxyType({"logprobs": "top_logprobs"})

    def __init__(self, service: Service, body: ChatRequest, http: HttpRequest) -> None:
        super().__init__(service, body, http)
        self.choice = choice_of(body)
        settings = service.settings
        functions = [tool.function.model_dump() for tool in body.tools or []]
        self.reader = Reader(
            settings.reasoning, settings.tool_form, self.choice.how, types_of(functions)
        )

    def told(self, error: RequestError) -> RequestError:
        """See ``ApiCall.told``."""
        name = self.names.get(error.param or "")
        if name is not None:
            error.args = (str(error).replace(str(error.param), name, 1),)
            error.param = name
        return error

    async def prepare(self) -> None:
        """Make the state of the call's request."""
        body = self.body
        if body.top_logprobs and not body.logprobs:
            raise Refusal("top_logprobs needs logprobs: true.", "top_logprobs")
        listed = (body.top_logprobs or 0) if body.logprobs else None
        form, leaves = self._form()
        self.lease = self.service.admit(body.n)
        await self.read_options(self.repeated, logprobs=listed)
        tools = (body.tools or []) if self.choice.how != "none" else []
        whole, prompt = await self.service.texts.chat_ids(body.messages, tools, body, self.long)
        self.more |= self._behind_thoughts(form, leaves, prompt)
        ids = self.truncated(whole)
        if self.recorder is not None:
            self.asked = [of_messages(body.messages) if ids is whole else None]
        body.messages = []  # they may be long, and are not needed any more
        self.states = [self.start(ids)]
        self.lease.add_tokens(len(ids))

    def _form(self) -> tuple[dict[str, Any] | None, bool]:
        """Return the form of the output, None for any, and whether it leaves room for thoughts.

        The form is the body's, or that of tool calls. No form, or one with free text, leaves room.

        Raises Refusal: a call must be made, but the body asks for another form.
        """
        body, inputs, settings = self.body, self.service.llm.inputs, self.service.settings
        special, ends = inputs.outputs.special_tokens, inputs.eos_token_ids
        marks = {*MARKS[settings.tool_form], *self._marks}
        others = sorted(
            id
            for token, id in special.items()
            if token not in marks and id not in ends and id < inputs.vocab_size
        )
        own = body.form()
        several = body.parallel_tool_calls
        calls = constraint(self.choice, settings.tool_form, special, others, several)
        if calls is None or (self.choice.how == "auto" and (own is not None or body.ignore_eos)):
            if own is not None:
                self.reader.how = "none"  # the form leaves no room for calls
            return own, own is None
        if own is not None:
            raise Refusal("tool_choice and an output format are mutually exclusive.", "tool_choice")
        return calls, self.choice.how == "auto"

    @property
    def _marks(self) -> frozenset[str]:
        """Texts that mark thoughts."""
        return frozenset() if self.reader.reasoning is None else self.reader.reasoning.marks

    def _behind_thoughts(
        self, form: dict[str, Any] | None, leaves: bool, prompt: str
    ) -> dict[str, Any]:
        """Return sampling options: the form, which begins after thoughts if there may be some.

        ``form`` and ``leaves`` are what ``_form`` returns, ``prompt`` is the conversation's text.
        Raises Refusal: thoughts cannot be bounded.
        """
        body, reasoning = self.body, self.reader.reasoning
        budget = body.thinking_token_budget
        if budget is not None and not -1 <= budget <= LARGEST_INT:
            raise Refusal(
                f"thinking_token_budget is {shown(budget)}; give 0 to {LARGEST_INT}, or -1 for "
                "none.", "thinking_token_budget",
            )  # fmt: skip
        budget = None if budget == -1 else budget
        ended = reasoning is None or reasoning.ended(prompt)
        if reasoning is not None:
            self.reader.begun = reasoning.begun(prompt)
            if body.continue_final_message:
                (last,) = readable(body.messages[-1:])
                self.reader.begun = reasoning.unclosed(last["content"])
                ended = not self.reader.begun
        before = None if ended else self._before_form(budget)
        if before is None:
            if budget is not None and not ended:
                raise Refusal(f"thinking_token_budget: {NOT_BOUNDED}", "thinking_token_budget")
            if not (leaves or ended or "after" in (form or {})):
                self.reader.reasoning = None  # the form begins at once, so there are no thoughts
        elif form is not None or budget is not None:
            own = form or {}
            if "after" in own:  # the client says itself where its form begins
                before = {name: before[name] for name in before.keys() & {"budget"}}
            form = {**before, **own}
        options: dict[str, Any] = {} if form is None else {"structured_outputs": form}
        marks = self._marks | (set() if self.choice.how == "none" else {*MARKS[self.reader.form]})
        # If marks are special tokens, they must be shown.
        if marks & self.service.llm.inputs.outputs.special_tokens.keys():
            options["skip_special_tokens"] = False
        return options

    def _before_form(self, budget: int | None) -> dict[str, Any] | None:
        """Return marks and budget of thoughts for the form; None unless each mark is a token."""
        reasoning, codec = self.reader.reasoning, self.service.llm.inputs.codec
        if reasoning is None or reasoning.closing is None or codec is None:
            return None
        marks = {"after": reasoning.closing}
        if not self.reader.begun:
            marks["opening"] = str(reasoning.opening)
        if any(len(codec.encode(mark, False, rendered=True)) != 1 for mark in marks.values()):
            return None
        opened = "opening" in marks  # this mark is a token, but no thought
        return marks | ({} if budget is None else {"budget": budget + opened})

    def read(self, sample: SampleState, whole: bool = True) -> Said:
        """Return the parts of a sample; only what is certain unless it is ``whole``."""
        return self.reader.read(sample.text, whole)

    def said(self, sample: SampleState) -> str:
        """See ``ApiCall.said``."""
        said = self.read(sample)
        return "" if said.calls else said.content

    @property
    def num_thought_tokens(self) -> int:
        """Tokens of all samples that are thoughts."""
        if self.reader.reasoning is None:
            return 0
        outputs, count = self.service.llm.inputs.outputs, self.reader.num_thought_tokens
        return sum(
            count(sample, outputs.shown(state.request))
            for state in self.states
            for sample in state.samples
        )

    def usage(self, output: int | None = None) -> dict[str, Any]:
        """Return OpenAI's ``usage``, with the tokens of thoughts."""
        used = super().usage(output)
        if self.reader.reasoning is not None:
            used["completion_tokens_details"]["reasoning_tokens"] = self.num_thought_tokens
        return used
