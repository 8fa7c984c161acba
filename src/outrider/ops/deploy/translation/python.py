"""Python calls of vLLM with old keyword arguments, rewritten in their place."""

from __future__ import annotations

import ast

from ....errors import ConfigError
from .rules import Change, Rule, table
from .vllm import current, typed, with_target_gpus

CALLS = ("LLM", "EngineArgs", "AsyncEngineArgs")
OLD_ENGINE = ("vllm.engine.async_llm_engine", "AsyncLLMEngine")
NEW_ENGINE = ("vllm.v1.engine.async_llm", "AsyncLLM")
METRICS = {
    "first_scheduled_time": "scheduled_ts", "first_token_time": "first_token_ts",
    "last_token_time": "last_token_ts", "finished_time": "last_token_ts",
    "time_in_queue": "scheduled_ts - queued_ts", "scheduler_time": "nothing",
    "model_forward_time": "nothing", "model_execute_time": "nothing",
    "spec_token_acceptance_counts": "LLM.get_metrics()",
}  # fmt: skip
"""Fields of an output's ``metrics``, and their successors."""


def rewrite(source: str) -> tuple[str, list[Change]]:
    """Return the source with its old calls as today's, and what changed; the rest stays.

    Raises:
        ConfigError: it is no Python, or a call drafts in a way that vLLM has no more.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, MemoryError) as error:
        raise ConfigError(f"The text is no Python: {error}.") from None
    changes: list[Change] = []
    edits: list[tuple[ast.expr | ast.stmt, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name(node.func) in CALLS:
            text = _call(node, changes)
            if text is not None:
                edits.append((node, text))
    _rename_engine(tree, edits, changes)
    _remark(tree, changes)
    return _edited(source, edits), changes


def _name(node: ast.expr) -> str:
    return ast.unparse(node).rpartition(".")[2]


def _rules() -> dict[str, Rule]:
    """Return the rules of flags by keyword; those of flags that stay are not among them."""
    return {old[2:].replace("-", "_"): rule for old, rule in table("vllm").rules.items()}


def _call(node: ast.Call, changes: list[Change]) -> str | None:
    """Return the call of today, None where nothing in it is old."""
    rules = _rules()
    old = [word for word in node.keywords if word.arg in rules]
    if not old:
        return None
    kept = [word for word in node.keywords if word.arg not in rules]
    config: dict[str, ast.expr] = {}
    for word in old:
        rule = rules[str(word.arg)]
        was = f"{word.arg}={ast.unparse(word.value)}"
        unset = isinstance(word.value, ast.Constant) and word.value.value in (None, False)
        if rule.key is not None and not unset:
            config[rule.key] = word.value
        elif rule.option is not None and not unset:
            name = rule.option[2:].replace("-", "_")
            kept.append(ast.keyword(name, ast.Constant(rule.value)))
        changes.append(Change(was, rule.new.replace("--", ""), rule.why))
    if config and any(word.arg == "speculative_config" for word in kept):
        raise ConfigError("A call has speculative_config and old arguments beside it; keep one.")
    if config:
        sizes = [w.value for w in kept if w.arg == "tensor_parallel_size"]
        kept.append(ast.keyword("speculative_config", _config(config, sizes, changes)))
    words = [ast.unparse(each) for each in node.args]
    words += [
        f"{w.arg}={ast.unparse(w.value)}" if w.arg else f"**{ast.unparse(w.value)}" for w in kept
    ]
    inner = "".join(f"    {word},\n" for word in words)
    return f"{ast.unparse(node.func)}(\n{inner})"


def _config(config: dict[str, ast.expr], sizes: list[ast.expr], changes: list[Change]) -> ast.expr:
    """Return the dictionary of ``speculative_config``; values that are no literals stay code."""
    code: dict[str, ast.expr] = {}
    plain: dict[str, object] = {}
    for key, value in config.items():
        if isinstance(value, ast.Constant):
            whole = isinstance(value.value, str)
            plain[key] = typed(key, str(value.value)) if whole else value.value
        else:
            code[key] = value
            plain[key] = ast.unparse(value)  # a stand-in: its name tells nothing of the value
    today = current(dict(plain), 1024, changes)
    for size in sizes:
        if isinstance(size, ast.Constant) and isinstance(size.value, int):
            today = with_target_gpus(today, size.value, changes)
    keys: list[ast.expr | None] = [ast.Constant(key) for key in today]
    values = [
        code[key] if key in code else ast.parse(repr(value), mode="eval").body
        for key, value in today.items()
    ]
    return ast.Dict(keys, values)


def _rename_engine(
    tree: ast.Module, edits: list[tuple[ast.expr | ast.stmt, str]], changes: list[Change]
) -> None:
    """Name the engine as today, where it is imported and where it is used."""
    imported = False
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(a.name == OLD_ENGINE[1] for a in node.names):
            others = [ast.unparse(a) for a in node.names if a.name != OLD_ENGINE[1]]
            own = next(a.asname for a in node.names if a.name == OLD_ENGINE[1])
            renamed = f"{NEW_ENGINE[1]} as {own}" if own else NEW_ENGINE[1]
            text = f"from {NEW_ENGINE[0]} import {renamed}"
            if others:
                text = f"from {node.module} import {', '.join(others)}\n{text}"
            edits.append((node, text))
            imported = imported or own is None
            why = "the old name is an alias that is kept for old code"
            changes.append(Change(f"{node.module}.{OLD_ENGINE[1]}", ".".join(NEW_ENGINE), why))
    for node in ast.walk(tree):
        if imported and isinstance(node, ast.Name) and node.id == OLD_ENGINE[1]:
            edits.append((node, NEW_ENGINE[1]))
        elif isinstance(node, ast.Name | ast.Attribute) and _name(node) == OLD_ENGINE[1]:
            why = (
                "its import is not in this text; the old name is an alias for old code, "
                f"and the new name is {NEW_ENGINE[1]}, from {NEW_ENGINE[0]}"
            )
            changes.append(Change(f"line {node.lineno}: {ast.unparse(node)}", "unchanged", why))


def _remark(tree: ast.Module, changes: list[Change]) -> None:
    """Note how the fields of an output's ``metrics`` changed; the code stays as it is."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {alias.asname or alias.name.partition(".")[0] for i in imports for alias in i.names}
    read = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    told = {id(node.value) for node in read if node.attr in METRICS}
    for node in sorted(read, key=lambda node: (node.lineno, node.col_offset)):
        if _root(node) in modules:
            continue
        old = f"line {node.lineno}: {ast.unparse(node)}"
        if node.attr == "spec_token_acceptance_counts":
            why = "accepted tokens by position are counted by the engine, not by request"
            changes.append(Change(old, METRICS[node.attr], why))
        elif node.attr in METRICS:
            why = "the figures have other names, and those in _ts are of a monotonic clock"
            changes.append(Change(old, METRICS[node.attr], why))
        elif node.attr == "metrics" and id(node) not in told:
            why = "None unless LLM gets disable_log_stats=False, and most fields have other names"
            changes.append(Change(old, "unchanged", why))


def _root(node: ast.expr) -> str | None:
    """Return the name that a chain of attributes begins with."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _edited(source: str, edits: list[tuple[ast.expr | ast.stmt, str]]) -> str:
    """Return the source with nodes replaced, the last first, so that places stay right."""
    lines = source.encode("utf-8").splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    data = b"".join(lines)
    spans = []
    for node, text in edits:
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[int(node.end_lineno or 0) - 1] + int(node.end_col_offset or 0)
        line = lines[node.lineno - 1]
        indent = line[: len(line) - len(line.lstrip())].decode()
        spans.append((begin, end, text.replace("\n", "\n" + indent)))
    limit = len(data)
    for begin, end, text in sorted(spans, reverse=True):
        if end <= limit:  # a call inside one that was replaced is old text already
            data = data[:begin] + text.encode("utf-8") + data[end:]
            limit = begin
    return data.decode("utf-8")
