"""Chat templates: Jinja as transformers runs it, in a sandbox with a budget.

A template is a program that comes with a checkpoint. Loops, calls and texts are counted, so
each rendering takes bounded time and gives a text of bounded size.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache, wraps
from typing import Any, NoReturn

from jinja2 import Environment, Template, TemplateError, nodes, pass_environment
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from ..base.fields import one_line
from ..errors import RequestError

STEPS = 1_000_000
"""Most iterations, calls and operations of one rendering."""
LONGEST_TEXT = 1 << 24
"""Most characters of any text that a template makes, including the prompt."""
PER_VALUE = 64
"""Characters that a value counts for in addition to its own."""
LONGEST_TEMPLATE = 1 << 17
"""Most characters of a template; jinja2 takes a minute to parse a MiB."""
WIDEST = 64
"""The largest width, indent or count as an argument of ``PADDING``."""
PADDING = frozenset(
    {"center", "ljust", "rjust", "zfill", "expandtabs", "indent", "tojson", "batch", "slice"}
)
REPEATING = frozenset({"replace", "join", "wordwrap", "indent"})
"""Calls that may repeat a text many times."""
COMPARING = ("==", "eq", "equalto", "!=", "ne", "<", "lt", "lessthan", "<=", "le", ">", "gt",
             "greaterthan", ">=", "ge", "in")  # fmt: skip
"""Tests of two values."""
WIDTH = re.compile(r"%[^a-zA-Z%]*\*|\d{4}")
"""What is refused in format strings: a width as an argument, or a large width."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning; templates read the first, or "thinking"."""
TAG = "CONTINUE_FINAL_MESSAGE_TAG "

CONTAINERS = (list, tuple, dict, set, Namespace)
_left: ContextVar[int] = ContextVar("_left", default=STEPS)


def _spend(steps: int = 1) -> None:
    left = _left.get() - steps
    _left.set(left)
    if left < 0:
        raise TemplateError(f"it takes more than {STEPS} steps")


def _sized(value: Any) -> Any:
    """Return ``value``; refuse texts, lists and numbers beyond the limits."""
    if _length(value) > LONGEST_TEXT:
        raise _too_long()
    if isinstance(value, int) and value.bit_length() > 256:
        raise TemplateError("it makes a number of more than 256 bits")
    return _weighed(value)


def _weighed(value: Any) -> Any:
    """Return ``value``; spend the steps that writing or comparing it takes.

    Shared parts count each time: a list that holds another twice, and so on, is short, but its text
    is long.
    """
    if not isinstance(value, CONTAINERS):
        _spend(len(value) // 256 if isinstance(value, str | bytes) else 0)
        return value
    left, size, seen = [value], 0, 0
    while left:
        each = left.pop()
        seen += 1
        if isinstance(each, str | bytes):
            size += len(each)
        elif isinstance(each, dict):
            left += each.keys()
            left += each.values()
        elif isinstance(each, list | tuple | set):
            left += each
        elif isinstance(each, Namespace):
            left.append(each._Namespace__attrs)
        size += PER_VALUE
        if size > LONGEST_TEXT:
            raise _too_long()
    _spend(seen // 4 + size // 4096)
    return value


def _cost(value: object) -> int:
    """Return the steps that handling ``value`` takes."""
    if isinstance(value, str | bytes):
        return len(value) // 256
    return len(value) // 4 if isinstance(value, list | tuple | dict | range) else 0


def _length(value: object) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple | range) else 0


def _too_long() -> TemplateError:
    return TemplateError(f"it makes a text of more than {LONGEST_TEXT} characters")


def _check_call(owner: object, name: str, args: list[Any]) -> None:
    """Refuse a call that makes something large of small arguments."""
    _spend(1 + _cost(owner) + sum(map(_cost, args)))
    if name in PADDING and any(isinstance(n, int | float) and abs(n) > WIDEST for n in args):
        raise TemplateError(f"it calls {name} with a number above {WIDEST}")
    if name in REPEATING and _repeated(owner, name, args) > LONGEST_TEXT:
        raise _too_long()
    if name in ("format", "format_map") and isinstance(owner, str) and WIDTH.search(owner):
        raise TemplateError("it formats a text with too large a width")


def _repeated(owner: object, name: str, args: list[Any]) -> int:
    """Return a bound on the characters that a call in ``REPEATING`` adds."""
    if name == "replace" and isinstance(owner, str) and len(args) > 1:
        return owner.count(str(args[0])) * _length(args[1])
    if name == "join" and isinstance(owner, str):
        return _length(owner) * max(map(_length, args), default=0)
    width = max((_length(n) or (n if isinstance(n, int) else 0) for n in args), default=0)
    lines = owner.count("\n") + 1 if isinstance(owner, str) else _length(owner)
    return (_length(owner) if name == "wordwrap" else lines) * width


def _bounded(name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
    """Return the filter with its arguments and result checked."""

    @wraps(filter)
    def run(*args: Any, **options: Any) -> Any:
        owner, *values = [a for a in args if not isinstance(a, Context | _Environment)] or [None]
        _check_call(owner, name, [*values, *options.values()])
        return _sized(filter(*args, **options))

    return run


def _comparing(test: Callable[..., Any]) -> Callable[..., Any]:
    """Return the test with its operands weighed."""
    return wraps(test)(lambda *args: test(*map(_weighed, args)))


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    """Yield the items of a loop, each of which takes a step."""
    for item in items:
        _spend()
        yield item


def _concat(parts: Iterable[str]) -> str:
    """Return ``parts`` joined, of bounded length."""
    texts, length = [], 0
    for part in parts:
        length += len(part)
        if length > LONGEST_TEXT:
            raise _too_long()
        texts.append(part)
    _spend(1 + length // 256)
    return "".join(texts)


class _Weights(NodeTransformer):
    """Makes a template weigh the values that it joins or compares."""

    def visit(self, node: nodes.Node, *args: Any, **options: Any) -> nodes.Node:
        node = self.generic_visit(node, *args, **options)
        if isinstance(node, nodes.Compare):
            holders: list[nodes.Compare | nodes.Operand] = [node, *node.ops]
            for holder in holders:
                if not isinstance(holder.expr, nodes.Const):
                    holder.expr = _filtered("_weighed", holder.expr)
        built = isinstance(node, nodes.List | nodes.Dict) or (
            isinstance(node, nodes.Tuple) and node.ctx == "load"
        )
        return _filtered("_weighed", node) if built else node


def _filtered(name: str, node: Any, *args: nodes.Expr) -> Any:
    """Return the node of a filter over ``node``."""
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


@pass_environment
def _summed(
    environment: Environment, items: Iterable[Any], attribute: Any = None, start: Any = 0
) -> Any:
    """Return what Jinja's filter ``sum`` gives; sums of lists are counted as other additions."""
    if attribute is not None:
        items = map(make_attrgetter(environment, attribute), items)
    total = start
    for item in items:
        total = environment.call_binop(None, "+", total, item)  # type: ignore[attr-defined]
    return total


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, configured as transformers does; counts what templates do."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])
    concat = staticmethod(_concat)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = _filtered("_counted", loop.iter)
        for text in list(tree.find_all(nodes.Concat)):
            first, *rest = text.nodes
            text.nodes = [_filtered("_joined", first, *rest)]
        _Weights().visit(tree)
        return tree

    def call(self, context: Context, called: Any, *args: Any, **options: Any) -> Any:
        method = getattr(called, "__wrapped__", called)  # the sandbox wraps ``format``
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "a function")
        _check_call(owner, name, [*args, *options.values()])
        for each in (*args, *options.values()):
            _weighed(each)
        return _sized(super().call(context, called, *args, **options))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
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
    """``{% generation %}``, which marks a model's words for training: here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
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
    """Return plain JSON; Jinja's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@lru_cache(maxsize=16)
def _compiled(template: str) -> Template:
    if len(template) > LONGEST_TEMPLATE:
        raise TemplateError(f"it has more than {LONGEST_TEMPLATE} characters")
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters |= {"tojson": _tojson, "sum": _summed}
    for name, filter in list(environment.filters.items()):
        environment.filters[name] = _bounded(name, filter)
    tests: dict[str, Any] = environment.tests
    tests |= {name: _comparing(tests[name]) for name in COMPARING}
    environment.filters |= {
        "_counted": _counted, "_joined": lambda *parts: _concat(map(str, parts)),
        "_weighed": _weighed,
    }  # fmt: skip
    del environment.globals["lipsum"]  # no template needs it, and it makes texts of any length
    environment.globals |= {
        "raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": _Namespace,
    }  # fmt: skip
    return environment.from_string(template)


def render(template: str, messages: Iterable[Mapping[str, Any]], **variables: Any) -> str:
    """Return the text of a conversation by a chat template.

    Like transformers' ``apply_chat_template``, it leaves out values of messages that are None and
    gives the reasoning under each of its names. With the variable ``continue_final_message`` the
    text ends where the content of the last message, a text, ends.
    """
    continued, ending = variables.pop("continue_final_message", False), ""
    token = _left.set(STEPS)
    try:
        chat = [_plain(message) for message in messages]
        if continued:
            ending = chat[-1]["content"]
            chat[-1]["content"] += TAG
        text = _compiled(template).render(messages=chat, **variables)
    except RecursionError:
        raise RequestError("the messages nest too deeply; flatten them.") from None
    except Exception as error:  # a template may raise any type
        raise RequestError(f"the chat template refused the messages: {one_line(error)}.") from None
    finally:
        _left.reset(token)
    if not continued:
        return text
    at = text.rfind(TAG.strip())
    if at < 0 or ending.strip() not in text:
        raise RequestError(
            "continue_final_message is set, but the chat template leaves the last message out."
        )
    return text[:at] if text.startswith(TAG, at) else text[:at].rstrip()


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of ``message`` without None values, its reasoning under every name."""
    values = {name: value for name, value in message.items() if value is not None}
    reasoning = next((values[name] for name in REASONING if name in values), None)
    if reasoning is not None:
        values = {"thinking": reasoning, **values, "reasoning_content": reasoning}
    return values
