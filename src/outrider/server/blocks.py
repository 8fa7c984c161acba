"""An answer as a sequence of blocks: thoughts, text, and calls, one after the other."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from fastapi import Request as HttpRequest

from ..frontend.outputs import SampleState
from ..text.called import json_end
from .dialogue import Dialogue, News, Seen
from .protocol import ChatRequest
from .service import Service

Kind = Literal["thoughts", "text", "call"]


@dataclass
class Block:
    """One block so far: its number in the answer, and its text or a call's arguments.

    A call has a ``name`` and an ``id``.
    """

    kind: Kind
    number: int
    text: str = ""
    name: str = ""
    id: str = ""


class Change(NamedTuple):
    """A change of a block: it begins, it gets more text, or it ends."""

    what: Literal["begins", "more", "ends"]
    block: Block
    text: str = ""


@dataclass
class Blocks:
    """The blocks of an answer; the last one may still grow."""

    all: list[Block] = field(default_factory=list)
    _open: bool = False

    def take(self, news: News) -> Iterator[Change]:
        """Yield the changes that a step brings."""
        if news.thoughts:
            yield from self._more("thoughts", news.thoughts)
        if news.content:
            yield from self._more("text", news.content)
        for each in news.calls:
            if each.first:
                yield from self._begin("call", each.call.name, each.id)
            if each.arguments:
                yield from self._more("call", each.arguments)

    def end(self, cut: bool) -> Iterator[Change]:
        """Yield the changes at the end; an answer without text and calls gets an empty text.

        An answer that was ``cut`` off within its thoughts stays without a text.
        """
        if all(block.kind == "thoughts" for block in self.all) and not (cut and self.all):
            yield from self._begin("text")
        yield from self._close()

    def _more(self, kind: Kind, text: str) -> Iterator[Change]:
        if not self._open or self.all[-1].kind != kind:
            yield from self._begin(kind)
        self.all[-1].text += text
        yield Change("more", self.all[-1], text)

    def _begin(self, kind: Kind, name: str = "", id: str = "") -> Iterator[Change]:
        yield from self._close()
        self.all.append(Block(kind, len(self.all), "", name, id))
        self._open = True
        yield Change("begins", self.all[-1])

    def _close(self) -> Iterator[Change]:
        if self._open:
            self._open = False
            yield Change("ends", self.all[-1])


class BlockCall(Dialogue):
    """A call whose answer is one sample, sent as blocks."""

    named_events = True

    def __init__(self, service: Service, body: ChatRequest, http: HttpRequest) -> None:
        super().__init__(service, body, http)
        self.blocks = Blocks()
        self.cancelled = False

    @property
    def sample(self) -> SampleState:
        """The sample of the call."""
        return self.states[0].samples[0]

    @property
    def cut(self) -> bool:
        """True where the answer did not end by itself."""
        return self.sample.finish_reason != "stop" or self.sample.stop_reason is not None

    @staticmethod
    def is_whole(block: Block) -> bool:
        """Return whether the arguments of a call are complete."""
        return json_end(block.text) == len(block.text.rstrip())

    @property
    def calls(self) -> list[Block]:
        """The blocks that call tools."""
        return [block for block in self.blocks.all if block.kind == "call"]

    @property
    def calls_whole(self) -> bool:
        """True where the arguments of every call are complete."""
        return all(map(self.is_whole, self.calls))

    @property
    def shown(self) -> list[Block]:
        """The blocks that clients see."""
        return [b for b in self.blocks.all if b.kind != "thoughts" or self.body.include_reasoning]

    def place(self, block: Block) -> int:
        """Return the number of a block among those that clients see."""
        return next(number for number, each in enumerate(self.shown) if each is block)

    def finish(self) -> None:
        """Read the whole answer at once."""
        news = Seen().news(self.read(self.sample))
        for _ in (*self.blocks.take(news), *self.blocks.end(self.cut)):
            pass

    async def changes(self) -> AsyncIterator[list[Change]]:
        """Yield the changes of each step until the call is cancelled, and those at the end."""
        (run,) = self.runs()
        seen = Seen()
        async for events in run:
            whole = events[-1].finish_reason is not None
            changes = self.blocks.take(seen.news(self.read(self.sample, whole)))
            yield [each for each in changes if each.block in self.shown]
            if self.cancelled:
                await run.aclose()
                break
        yield [each for each in self.blocks.end(self.cut) if each.block in self.shown]
