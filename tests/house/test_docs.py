"""Paths, names, commands and options that the docs mention in backquotes exist."""

import ast
import graphlib
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from benchmarks.__main__ import BENCHMARKS
from outrider.cli import app
from tests.support import REPOSITORY

SOURCE = REPOSITORY / "src"
HISTORY = {"docs/upstream/vllm-strict.md"}
"""Pages that speak of what is gone, or of another project."""
PAGES = sorted(
    str(file.relative_to(REPOSITORY))
    for folder in (".", "dev", "docs", "docs/upstream", "benchmarks", "deploy", "tests")
    for file in (REPOSITORY / folder).glob("*.md")
    if file.name != "CHANGELOG.md" and str(file.relative_to(REPOSITORY)) not in HISTORY
)
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
SPAN = re.compile(r"`+([^`]+)`+")
PATH = re.compile(r"[\w.-]+\.(py|md|toml|json|jsonl|cpp|hpp|yaml|yml|sh)|[\w-]+(/[\w.-]+)+/?")
CLASS_MEMBER = re.compile(r"([A-Z]\w*)\.(\w+)(\(\))?")
CLASS = re.compile(r"[A-Z][a-z]\w+")
OPTION = re.compile(r"(?<!\S)--[a-z][\w-]*")
USERS_FILES = {
    "config.json", "generation_config.json", "tokenizer.json", "signatures.json", "audit.jsonl",
    "model.gguf", "CHANGELOG.md", "path/to/model", "application/json", "ENGINE.toml", "enum.py",
    "fuzz.json", "prompts.jsonl", "data.json", "curves.csv", "report.html", "report.json",
    "drafters/adapted", "recorded.jsonl", "skips.json", "question.jsonl",
    "data/spec_bench/question.jsonl", "prepare_data.py",
}  # fmt: skip
"""Files of users and of other projects."""
OTHERS = {
    "AutoModelForCausalLM", "Draft_Target", "Eagle3", "Exception", "ReadWriteMany",
    "RejectionSampleMethod", "SpeculativeConfig", "SystemExit", "DraftModelSpeculator",
    "RejectionSampler", "Runner", "Sampler", "SamplingBatchInfo", "CliRunner",
    "--use-rejection-sampling", "--stop-timeout", "--build-arg", "--volume", "LLM.get_metrics()",
}  # fmt: skip
"""Classes and options of libraries, containers and other engines."""


@cache
def tracked() -> set[str]:
    """Return the paths of all files and folders of the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    files = {Path(line) for line in listed.splitlines()}
    return {str(path) for file in files for path in (file, *file.parents)}


@cache
def classes() -> dict[str, set[str]]:
    """Return the members of every class by its name, those of all of one name and of its bases."""
    own: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for folder in ("src", "benchmarks"):
        for file in (REPOSITORY / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    own.setdefault(node.name, set()).update(members(node))
                    above = {base.id for base in node.bases if isinstance(base, ast.Name)}
                    bases.setdefault(node.name, set()).update(above)
    for name in graphlib.TopologicalSorter({n: b - {n} for n, b in bases.items()}).static_order():
        for base in bases.get(name, ()):
            own[name] |= own.get(base, set())
    for file in (SOURCE / "outrider" / "native" / "src").iterdir():
        for name in re.findall(r"^(?:class|struct) (\w+)", file.read_text(), re.MULTILINE):
            own.setdefault(name, set())
    return own


def members(node: ast.ClassDef) -> Iterator[str]:
    """Yield the names of methods, fields and attributes."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            yield inner.name
        elif isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
            yield inner.attr
        elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            yield inner.id


@cache
def ours() -> Any:
    """Return the command line of ``outrider``."""
    return typer.main.get_command(app)


def benchmark_options(module: str) -> set[str]:
    """Return the options of a benchmark, read from its source: to import all takes long."""
    file = REPOSITORY / "benchmarks" / f"{module.replace('.', '/')}.py"
    text = file.read_text(encoding="utf-8")
    names = re.findall(r"^ {4}(\w+): ", text[text.index("def main(") :], re.MULTILINE)
    shared = (REPOSITORY / "benchmarks" / "common.py").read_text(encoding="utf-8")
    given = set(re.findall(r'"(--[\w-]+)', text + shared))
    return given | {"--" + name.strip("_").replace("_", "-") for name in names}


@cache
def options() -> set[str]:
    """Return the options of our commands and benchmarks, and those that data files know."""
    found: set[str] = set()
    commands = [ours()]
    while commands:
        command = commands.pop()
        commands += getattr(command, "commands", {}).values()
        found |= options_of(command, [])[1]
    for module, _ in BENCHMARKS.values():
        found |= benchmark_options(module)
    data = (SOURCE / "outrider").rglob("data/**/*.*")
    texts = [each.read_text(encoding="utf-8") for each in data if each.suffix in (".toml", ".json")]
    texts += [each.read_text(encoding="utf-8") for each in (SOURCE / "outrider").rglob("*.py")]
    for text in texts:
        names = re.findall(r"[\"'`](?:--)?([a-z][\w-]+)[\"'`]", text)
        found |= {f"--{name}" for name in names} | {f"--{n.replace('_', '-')}" for n in names}
        found |= set(OPTION.findall(text.replace('"', " ")))
    return found


def options_of(command: Any, words: list[str]) -> tuple[Any, set[str]]:
    """Return the command that words name, and the options of it."""
    for word in words:
        inner = getattr(command, "commands", {}).get(word)
        if inner is None:
            break
        command = inner
    command = getattr(command, "commands", {}).get(getattr(command, "default", None), command)
    options = {o for each in command.params for o in (*each.opts, *each.secondary_opts)}
    hidden = {"--model"} if "model" in options else set()  # the argument, as an option
    return command, options | hidden | {"--help"}


def wrong_command(line: str) -> str | None:
    """Return what is wrong with a command line of ours, None for nothing."""
    line = line.split("#")[0].split("|")[0].split(" && ")[0].strip()
    asked = set(OPTION.findall(line.replace("=", " ")))
    words = line.split()
    if words[0] == "outrider":
        root = ours()
        if len(words) > 1 and words[1][0].islower() and words[1] not in root.commands:
            return f"outrider has no command {words[1]}"
        inner, known = options_of(root, words[1:])
        command = inner.name
    elif words[:3] == ["python", "-m", "benchmarks"] and len(words) > 3 and words[3].islower():
        if words[3] not in BENCHMARKS:
            return f"there is no benchmark {words[3]}"
        command, known = words[3], benchmark_options(BENCHMARKS[words[3]][0])
    elif words[:2] == ["python", "-m"] and words[2].startswith("outrider."):
        path = f"src/{words[2].replace('.', '/')}"
        return None if {f"{path}.py", f"{path}/__main__.py"} & tracked() else f"no module {path}"
    elif words[0] == "make" and len(words) > 1:
        rules = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
        return None if re.search(rf"^{words[1]}:", rules, re.MULTILINE) else "no such target"
    else:
        return None
    unknown = sorted(asked - known)
    return f"{command} has no option {', '.join(unknown)}" if unknown else None


def wrong(span: str) -> str | None:
    """Return what is wrong with what stands in backquotes, None for nothing."""
    if span in OTHERS:
        return None
    if span.startswith(("outrider ", "python -m ", "make ")):
        return wrong_command(span)
    if span.startswith("--"):
        name = re.split(r"[ =]", span)[0]
        return None if name in options() | OTHERS else "no such option"
    member = CLASS_MEMBER.fullmatch(span)
    if member and span not in USERS_FILES:
        name, attribute, _ = member.groups()
        if name in OTHERS:
            return None
        if name not in classes():
            return f"there is no class {name}"
        return None if attribute in classes()[name] else f"{name} has no {attribute}"
    if PATH.fullmatch(span):
        path = span.rstrip("/")
        if path in USERS_FILES or any(part.isupper() for part in re.split(r"[/.]", path)):
            return None
        there = any(each == path or each.endswith(f"/{path}") for each in tracked())
        return None if there else "no such file"
    if CLASS.fullmatch(span):
        return None if span in classes() or span in OTHERS else "no such class"
    return None


def problems(page: str) -> list[str]:
    """Return what a page mentions and is not there, a sentence each."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    found: list[str] = []
    for language, block in FENCED.findall(text):
        if language in ("", "bash", "sh", "console"):
            for line in block.replace("\\\n", " ").splitlines():
                line = line.removeprefix("$ ").strip()
                if line.startswith(("outrider ", "python -m ", "make ")):
                    problem = wrong_command(line)
                    found += [f"{page}: {line}: {problem}"] if problem else []
    for span in SPAN.findall(FENCED.sub("", text)):
        problem = wrong(" ".join(span.split()))
        found += [f"{page}: {span}: {problem}"] if problem else []
    return found


@pytest.mark.parametrize("page", PAGES)
def test_what_is_mentioned_is_there(page: str) -> None:
    assert problems(page) == []


@pytest.mark.parametrize(
    ("span", "problem"),
    [
        ("engine/nowhere.py", "no such file"),
        ("Engine.leap", "Engine has no leap"),
        ("Enginery.step", "there is no class Enginery"),
        ("Enginery", "no such class"),
        ("--max-num-sequins", "no such option"),
        ("outrider serv", "outrider has no command serv"),
        ("outrider serve --max-num-sequins 3", "serve has no option --max-num-sequins"),
        ("outrider ops guard status --sates x", "status has no option --sates"),
        ("python -m benchmarks nothing", "there is no benchmark nothing"),
        ("python -m benchmarks host --round 2", "host has no option --round"),
        ("make everything", "no such target"),
        ("python -m outrider.nowhere", "no module src/outrider/nowhere"),
    ],
)
def test_what_is_not_there_is_found(span: str, problem: str) -> None:
    assert wrong(span) == problem


@pytest.mark.parametrize(
    "span",
    [
        "engine/engine.py",
        "Engine.step",
        "Model.draft",
        "--max-num-seqs",
        "outrider ops guard status",
    ],
)
def test_what_is_there_passes(span: str) -> None:
    assert wrong(span) is None
