"""Chat templates: Jinja as transformers runs it, in a sandbox with a budget.

A template comes with a checkpoint and is a program. Its loops, calls and texts are counted, so that
rendering ends after a bounded time and with a text of bounded size. Each rendering has a budget of
its own, in whichever thread it runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache, wraps
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from ..errors import RequestError
from ..fields import one_line

STEPS = 1_000_000
"""Iterations, calls and operations of one rendering."""
LONGEST_TEXT = 1 << 24
"""Characters of a text that a template makes, the prompt included."""
WIDEST = 64
"""The largest width, indent or count that a template may give to one of ``PADDING``."""
PADDING = frozenset(
    {"center", "ljust", "rjust", "zfill", "expandtabs", "indent", "tojson", "batch", "slice"}
)
REPEATING = frozenset({"replace", "join", "wordwrap", "indent"})
"""Calls that may put one text into another many times."""
WIDTH = re.compile(r"%[^a-zA-Z%]*\*|\d{4}")
"""What a format string may not hold: a width as an argument, or a large one."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which messages give their reasoning; templates read the first, or "thinking"."""
TAG = "CONTINUE_FINAL_MESSAGE_TAG "

_left: ContextVar[int] = ContextVar("_left", default=STEPS)


def _spend(steps: int = 1) -> None:
    left = _left.get() - steps
    _left.set(left)
    if left < 0:
        raise TemplateError(f"it takes more than {STEPS} steps")


def _sized(value: Any) -> Any:
    """``value``, if it is no text, list or number beyond the limits."""
    if _length(value) > LONGEST_TEXT:
        raise _too_long()
    _spend(_cost(value))
    if isinstance(value, int) and value.bit_length() > 256:
        raise TemplateError("it makes a number of more than 256 bits")
    return value


def _cost(value: object) -> int:
    """Steps that handling ``value`` takes."""
    if isinstance(value, str | bytes):
        return len(value) // 256
    return len(value) // 4 if isinstance(value, list | tuple | dict | range) else 0


def _length(value: object) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple | range) else 0


def _too_long() -> TemplateError:
    return TemplateError(f"it makes a text of more than {LONGEST_TEXT} characters")


def _check_call(owner: object, name: str, given: list[Any]) -> None:
    """Refuse a call that would make something large of small arguments."""
    _spend(1 + _cost(owner) + sum(map(_cost, given)))
    if name in PADDING and any(isinstance(n, int | float) and abs(n) > WIDEST for n in given):
        raise TemplateError(f"it calls {name} with a number above {WIDEST}")
    if name in REPEATING and _repeated(owner, name, given) > LONGEST_TEXT:
        raise _too_long()
    if name in ("format", "format_map") and isinstance(owner, str) and WIDTH.search(owner):
        raise TemplateError("it formats a text with too large a width")


def _repeated(owner: object, name: str, given: list[Any]) -> int:
    """Characters that a call in ``REPEATING`` adds at most."""
    if name == "replace" and isinstance(owner, str) and len(given) > 1:
        return owner.count(str(given[0])) * _length(given[1])
    if name == "join" and isinstance(owner, str):
        return _length(owner) * max(map(_length, given), default=0)
    width = max((_length(n) or (n if isinstance(n, int) else 0) for n in given), default=0)
    lines = owner.count("\n") + 1 if isinstance(owner, str) else _length(owner)
    return (_length(owner) if name == "wordwrap" else lines) * width


def _bounded(name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose arguments and result are checked."""

    @wraps(filter)
    def run(*args: Any, **more: Any) -> Any:
        given = [a for a in args if not isinstance(a, Context | _Environment)]
        owner = given[0] if given else None
        _check_call(owner, name, [*given[1:], *more.values()])
        return _sized(filter(*args, **more))

    return run


def _counted(items: Any) -> Any:
    """``items`` of a loop, each of them a step."""
    if isinstance(items, Undefined):
        return items
    if isinstance(items, list | tuple | dict | str | range):
        _spend(len(items))
        return items

    def each() -> Iterator[Any]:
        for item in items:
            _spend()
            yield item

    return each()


def _joined(*parts: Any) -> str:
    """The ``~`` of templates."""
    return _concat(map(str, parts))


def _concat(parts: Iterable[str]) -> str:
    """The text of ``parts``."""
    texts, length = [], 0
    for part in parts:
        length += len(part)
        if length > LONGEST_TEXT:
            raise _too_long()
        texts.append(part)
    _spend(1 + length // 256)
    return "".join(texts)


class _Environment(ImmutableSandboxedEnvironment):
    """Sandboxed as transformers' environment is; counts what templates do."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])
    concat = staticmethod(_concat)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "_counted", [], [], None, None, lineno=loop.lineno)
        for text in list(tree.find_all(nodes.Concat)):
            first, *rest = text.nodes
            joined = nodes.Filter(first, "_joined", rest, [], None, None, lineno=text.lineno)
            text.nodes = [joined]
        return tree

    def call(self, context: Context, called: Any, *args: Any, **more: Any) -> Any:
        """Call ``called`` for a template."""
        method = getattr(called, "__wrapped__", called)  # the sandbox wraps ``format``
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "a function")
        _check_call(owner, name, [*args, *more.values()])
        return _sized(super().call(context, called, *args, **more))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute ``left operator right`` for a template."""
        _spend()
        if operator == "*":
            count = max((n for n in (left, right) if isinstance(n, int)), default=0)
            if max(_length(left), _length(right)) * count > LONGEST_TEXT:
                raise _too_long()
        elif operator == "+" and _length(left) + _length(right) > LONGEST_TEXT:
            raise _too_long()
        elif operator == "**" and isinstance(right, int | float) and abs(right) > 256:
            raise TemplateError("it raises a number to a power above 256")
        elif operator == "%" and isinstance(left, str) and WIDTH.search(left):
            raise TemplateError("it formats a text with too large a width")
        return _sized(super().call_binop(context, operator, left, right))


class _Generation(Extension):
    """``{% generation %}``, which marks a model's own words for training: here they are text."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        """The statements between the tags, with variables of their own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Namespace(Namespace):
    """Jinja's ``namespace``, without names that begin with an underscore."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise TemplateError(f"it sets {name!r} on a namespace")
        super().__setitem__(name, value)


def _refuse(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; Jinja's own filter escapes what HTML minds."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _now(form: str) -> str:
    return datetime.now().strftime(form)


@lru_cache(maxsize=16)
def _compiled(template: str) -> Template:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    for name, filter in list(environment.filters.items()):
        environment.filters[name] = _bounded(name, filter)
    environment.filters |= {"_counted": _counted, "_joined": _joined}
    environment.globals |= {
        "raise_exception": _refuse, "strftime_now": _now, "namespace": _Namespace,
    }  # fmt: skip
    return environment.from_string(template)


def render(template: str, messages: Iterable[object], **given: Any) -> str:
    """The text of a conversation by a chat template.

    As transformers' ``apply_chat_template`` does, values that are None are left out of messages,
    and their reasoning is found under each of its names.

    Args:
        template: in Jinja.
        messages: of one conversation.
        given: more variables of the template; with ``continue_final_message`` the text ends where
            the content of the last message does.

    Raises:
        RequestError: the template is damaged, refuses the messages or exceeds its budget.
    """
    chat = [_plain(message) for message in messages]
    continued = given.pop("continue_final_message", False)
    ending = _tag(chat) if continued else ""
    token = _left.set(STEPS)
    try:
        text = _compiled(template).render(messages=chat, **given)
    except RecursionError:
        raise RequestError("the messages nest too deeply; flatten them.") from None
    except Exception as error:  # of whatever kind a program raises
        raise RequestError(f"the chat template refused the messages: {one_line(error)}.") from None
    finally:
        _left.reset(token)
    return _until_tag(text, ending) if continued else text


def _plain(message: object) -> dict[str, Any]:
    """A copy of ``message`` without values that are None, its reasoning under all its names.

    Raises:
        RequestError: it is no mapping.
    """
    if not isinstance(message, Mapping):
        raise RequestError("the chat template refused the messages: one of them is no object.")
    known = {name: value for name, value in message.items() if value is not None}
    reasoning = next((known[name] for name in REASONING if name in known), None)
    if reasoning is not None:
        known = {"thinking": reasoning, **known, "reasoning_content": reasoning}
    return known


def _tag(chat: list[dict[str, Any]]) -> str:
    """Mark the end of the last message's content; returns the content."""
    content = chat[-1].get("content") if chat else None
    if isinstance(content, list):
        content = [dict(part) if isinstance(part, dict) else part for part in content]
        chat[-1]["content"] = content
        part = next((p for p in reversed(content) if isinstance(p, dict) and "text" in p), None)
        if part is not None and isinstance(part["text"], str):
            found = part["text"]
            part["text"] += TAG
            return found
    elif isinstance(content, str):
        chat[-1]["content"] += TAG
        return content
    raise RequestError("continue_final_message needs a last message whose content is text.")


def _until_tag(text: str, ending: str) -> str:
    """``text`` up to the mark behind ``ending``."""
    at = text.rfind(TAG.strip())
    if at < 0 or ending.strip() not in text:
        raise RequestError(
            "continue_final_message is set, but the chat template leaves the last message out."
        )
    return text[:at] if text.startswith(TAG, at) else text[:at].rstrip()
