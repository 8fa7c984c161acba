"""Rewrites Python calls of vLLM with old keyword arguments in place."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ....errors import ConfigError
from ..capabilities import data
from .rules import Changes, rules_of
from .vllm import current, typed, with_target_gpus

CALLS = ("LLM", "EngineArgs", "AsyncEngineArgs")
OLD_ENGINE = "AsyncLLMEngine"
NEW_MODULE, NEW_ENGINE = "vllm.v1.engine.async_llm", "AsyncLLM"
Edit = tuple[ast.expr | ast.stmt, str]
"""A node, and the text that replaces it."""


def rewrite(source: str) -> tuple[str, Changes]:
    """Return the source with its old calls updated, and what changed; the rest stays."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, MemoryError) as error:
        raise ConfigError(f"The text is no Python: {error}.") from None
    changes = Changes()
    calls = [n for n in nodes if isinstance(n, ast.Call) and _name(n.func) in CALLS]
    edits: list[Edit] = [(node, text) for node in calls if (text := _call(node, changes))]
    edits += _renamed(nodes, changes)
    _remarks(nodes, changes)
    return _edited(source, edits), changes


def _name(node: ast.expr) -> str:
    return ast.unparse(node).rpartition(".")[2]


def _call(node: ast.Call, changes: Changes) -> str | None:
    """Return the updated call; None if nothing in it is old."""
    rules = {old[2:].replace("-", "_"): rule for old, rule in rules_of("vllm").items()}
    kept = [word for word in node.keywords if word.arg not in rules]
    if len(kept) == len(node.keywords):
        return None
    config: dict[str, ast.expr] = {}
    for word in node.keywords:
        if word.arg not in rules:
            continue
        rule = rules[word.arg]
        unset = isinstance(word.value, ast.Constant) and word.value.value in (None, False)
        if rule.key is not None and not unset:
            config[rule.key] = word.value
        elif rule.option is not None and not unset:
            name = rule.option[2:].replace("-", "_")
            kept.append(ast.keyword(name, ast.Constant(rule.value)))
        was = f"{word.arg}={ast.unparse(word.value)}"
        changes.add(was, rule.new.replace("--", ""), rule.why)
    if config and any(word.arg == "speculative_config" for word in kept):
        raise ConfigError("A call has speculative_config and old arguments beside it; keep one.")
    if config:
        sizes = [w.value for w in kept if w.arg == "tensor_parallel_size"]
        kept.append(ast.keyword("speculative_config", _config(config, sizes, changes)))
    words = [*map(ast.unparse, node.args), *map(ast.unparse, kept)]
    inner = "".join(f"    {word},\n" for word in words)
    return f"{ast.unparse(node.func)}(\n{inner})"


def _config(config: dict[str, ast.expr], sizes: list[ast.expr], changes: Changes) -> ast.expr:
    """Return the dictionary of ``speculative_config``; non-literal values stay as code."""
    plain: dict[str, object] = {}
    for key, value in config.items():
        if not isinstance(value, ast.Constant):
            plain[key] = ast.unparse(value)  # a placeholder; the value is unknown
        else:
            plain[key] = typed(key, value.value) if isinstance(value.value, str) else value.value
    today = current(plain, 1024, changes)
    for size in sizes:
        if isinstance(size, ast.Constant) and isinstance(size.value, int):
            today = with_target_gpus(today, size.value, changes)
    code = {key: value for key, value in config.items() if not isinstance(value, ast.Constant)}
    values = [
        code[key] if key in code else ast.parse(repr(value), mode="eval").body
        for key, value in today.items()
    ]
    return ast.Dict([ast.Constant(key) for key in today], values)


def _renamed(nodes: list[ast.AST], changes: Changes) -> Iterator[Edit]:
    """Yield the edits that rename the engine where it is imported and where it is used."""
    imported = False
    for node in nodes:
        if not isinstance(node, ast.ImportFrom):
            continue
        names = {alias.name: alias.asname for alias in node.names}
        if OLD_ENGINE in names:
            own = names[OLD_ENGINE]
            text = f"from {NEW_MODULE} import {NEW_ENGINE}{f' as {own}' if own else ''}"
            if others := [ast.unparse(a) for a in node.names if a.name != OLD_ENGINE]:
                text = f"from {node.module} import {', '.join(others)}\n{text}"
            yield node, text
            imported = imported or own is None
            changes.note("engine", module=node.module)
    for node in nodes:
        if imported and isinstance(node, ast.Name) and node.id == OLD_ENGINE:
            yield node, NEW_ENGINE
        elif isinstance(node, ast.Name | ast.Attribute) and _name(node) == OLD_ENGINE:
            changes.note("engine_elsewhere", line=node.lineno, code=ast.unparse(node))


def _remarks(nodes: list[ast.AST], changes: Changes) -> None:
    """Note how the fields of an output's ``metrics`` changed; the code is not edited."""
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {alias.asname or alias.name.partition(".")[0] for i in imports for alias in i.names}
    read = [n for n in nodes if isinstance(n, ast.Attribute) and _root(n) not in modules]
    fields = data("translations")["python"]["metrics"]
    told = {id(node.value) for node in read if node.attr in fields}
    for node in sorted(read, key=lambda node: (node.lineno, node.col_offset)):
        where = {"line": node.lineno, "code": ast.unparse(node)}
        if node.attr == "spec_token_acceptance_counts":
            changes.note("accepted_counts", **where)
        elif node.attr in fields:
            changes.note("metric", new=fields[node.attr], **where)
        elif node.attr == "metrics" and id(node) not in told:
            changes.note("metrics", **where)


def _root(node: ast.expr) -> str | None:
    """Return the name at the start of a chain of attributes; None if there is none."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _edited(source: str, edits: list[Edit]) -> str:
    """Return the source with nodes replaced, the last first, so that offsets stay valid."""
    lines = source.encode("utf-8").splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    spans = []
    for node, text in edits:
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[int(node.end_lineno or 0) - 1] + int(node.end_col_offset or 0)
        line = lines[node.lineno - 1]
        indent = line[: len(line) - len(line.lstrip())].decode()
        spans.append((begin, end, text.replace("\n", "\n" + indent)))
    data = b"".join(lines)
    limit = len(data)
    for begin, end, text in sorted(spans, reverse=True):
        if end <= limit:  # skip a call inside a replaced one
            data = data[:begin] + text.encode("utf-8") + data[end:]
            limit = begin
    return data.decode("utf-8")
