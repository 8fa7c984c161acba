"""``outrider ops deploy``: hostile values are refused in a sentence, or come back as given."""

from __future__ import annotations

import ast
import itertools
import json
import random
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from outrider.errors import ConfigError
from outrider.ops.deploy import capabilities
from outrider.ops.deploy.engines import LAUNCHES, Launch
from outrider.ops.deploy.render import FORMATS, Rendered, render
from outrider.ops.deploy.spec import Spec, filled, parse
from outrider.ops.deploy.translate import translate
from outrider.ops.deploy.yamls import dump
from tests.support.hostile import specs as hostile_specs
from tests.support.specs import pairs, rich

LONGEST = 1000
"""Characters of a sentence."""


def check_sentence(error: Exception) -> None:
    said = str(error)
    assert said.isprintable(), said
    assert said.endswith((".", "?")), said
    assert len(said) < LONGEST, said


def told(spec: Spec) -> Iterator[Any]:
    """Yield what every engine is told of a spec in its command or config."""
    yield spec.target.model
    if spec.drafts and spec.drafter.model is not None:
        yield spec.drafter.model
    if spec.limits.max_num_seqs is not None:
        yield spec.limits.max_num_seqs
    if spec.engine not in ("outrider", "llamacpp") and spec.target.revision is not None:
        yield spec.target.revision
    if spec.engine != "triton" and spec.service.model_name is not None:
        yield spec.service.model_name


def check_files(spec: Spec, form: str, result: Rendered, launch: Launch) -> None:
    files = {name: hostile_specs.parsed(name, text) for name, text in result.files.items()}
    words = launch.arguments()
    if form == "command":
        assert files["run.sh"] == words
    elif form == "compose":
        service = files["compose.yaml"][0]["services"]["engine"]
        assert [hostile_specs.text_of_compose(word) for word in service["entrypoint"]] == words
        if spec.service.image is not None:
            assert hostile_specs.text_of_compose(service["image"]) == spec.service.image
    elif form == "kustomize":
        (deployment,) = files["deployment.yaml"]
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        assert hostile_specs.words_of_kubernetes(container["command"]) == words
        assert container["image"] == spec.service.image or spec.service.image is None
        assert deployment["metadata"]["name"] == spec.service.name
        assert files["kustomization.yaml"][0]["namespace"] == spec.service.namespace
    found = [*words, *hostile_specs.leaves(words), *hostile_specs.leaves(files)]
    said = {f"{type(each).__name__} {each}" for each in found} | {f"str {each}" for each in found}
    for value in told(spec):
        # Our own server is told of a drafter together with how it is used.
        prefixes = ("", "auto+", "retokenize:") if spec.engine == "outrider" else ("",)
        own = spec.engine == "outrider" and spec.drafter.adaptive and value == spec.drafter.model
        assert own or any(f"str {prefix}{value}" in said for prefix in prefixes), value


def try_one(engine: str, method: str, form: str, rng: random.Random) -> bool:
    """Render a spoiled spec; return whether it was rendered, False where it was refused."""
    made = hostile_specs.spoiled(rich(engine, method), rng)
    try:
        spec = parse(made)
        result = render(spec, form)
    except ConfigError as refused:
        check_sentence(refused)
        return False
    known = capabilities.find(spec.engine, spec.engine_version)
    check_files(spec, form, result, LAUNCHES[known.engine](filled(spec), known))
    return True


@pytest.mark.parametrize("form", FORMATS)
def test_a_hostile_spec_is_refused_or_comes_back(form: str) -> None:
    rng = random.Random(f"specs {form}")
    rendered = [try_one(*rng.choice(pairs()), form, rng) for _ in range(150)]
    assert 20 < sum(rendered) < 130


VLLM = ["vllm serve", "python -m vllm.entrypoints.openai.api_server --model"]
KEPT = ("--revision", "--served-model-name", "--chat-template", "--api-key", "--download-dir")
OLD = {"--speculative-model": "model", "--speculative-model-quantization": "quantization"}


def quoted(rng: random.Random) -> str:
    """A hostile text as a word that a translation may keep: flags and variables it reads itself."""
    return rng.choice([t for t in hostile_specs.TEXTS if not t.startswith("-")])


def check_command(words: list[str], model: str, flags: dict[str, str]) -> None:
    assert words[:3] == ["vllm", "serve", model]
    said = dict(itertools.pairwise(words[3:]))
    config = json.loads(said.get("--speculative-config", "{}"))
    for flag, value in flags.items():
        got = config[OLD[flag]] if flag in OLD else said[flag]
        assert got == value or value in ("[ngram]", "ngram"), (flag, value)


def a_command(rng: random.Random) -> tuple[str, dict[str, str], list[str]]:
    """A model, flags with hostile values, and the words that say so."""
    flags = {flag: quoted(rng) for flag in rng.sample(KEPT, 2)}
    if rng.random() < 0.5:
        flags |= {flag: quoted(rng) for flag in OLD}
    model = quoted(rng) if rng.random() < 0.3 else "org/t"
    words = [word for pair in flags.items() for word in pair]
    return model, flags, [*words, *(["--num-speculative-tokens", "3"] if len(flags) > 2 else [])]


def try_shell(rng: random.Random) -> bool:
    model, flags, words = a_command(rng)
    line = f"{rng.choice(VLLM)} {shlex.join([model, *words])}"
    try:
        result = translate(line)
    except ConfigError as refused:
        check_sentence(refused)
        return False
    check_command(hostile_specs.words_of_shell(result.commented()), model, flags)
    return True


def try_manifest(rng: random.Random) -> bool:
    model, flags, words = a_command(rng)
    note, variable = quoted(rng), {"name": quoted(rng), "value": quoted(rng)}
    container = {
        "name": "a", "image": "vllm/vllm-openai:v0.6.3", "args": ["--model", model, *words],
        "env": [variable, {"name": quoted(rng) + "_TOKEN", "value": "x"}],
    }  # fmt: skip
    old = {
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"annotations": {"a": note}},
        "spec": {"template": {"spec": {"containers": [container]}}},
    }  # fmt: skip
    try:
        result = translate(dump(old))
    except ConfigError as refused:
        check_sentence(refused)
        return False
    (new,) = hostile_specs.documents(result.commented())
    (made,) = new["spec"]["template"]["spec"]["containers"]
    assert new["metadata"] == old["metadata"]
    assert made["env"][0] == variable or variable["name"].endswith(("TOKEN", "KEY", "PASSWORD"))
    check_command(made["command"], model, flags)
    return True


def try_python(rng: random.Random) -> bool:
    model, draft, other = quoted(rng), quoted(rng), quoted(rng)
    source = (
        f"from vllm import LLM\n# {other!r}\nllm = LLM({model!r}, speculative_model={draft!r}, "
        f"num_speculative_tokens=3, revision={other!r})  # ä {draft!r}\nprint({other!r})\n"
    )
    try:
        result = translate(source)
    except ConfigError as refused:
        check_sentence(refused)
        return False
    tree = ast.parse(result.commented())
    call = next(node for node in ast.walk(tree) if isinstance(node, ast.Call))
    said = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    assert ast.literal_eval(call.args[0]) == model
    assert said["revision"] == other
    config = said["speculative_config"]
    assert config["num_speculative_tokens"] == 3
    assert config.get("model") == draft or config["method"] == "ngram"
    assert ast.unparse(tree.body[-1]) == f"print({other!r})"
    return True


@pytest.mark.parametrize("attempt", [try_shell, try_manifest, try_python])
def test_hostile_old_forms_are_refused_or_come_back(
    attempt: Callable[[random.Random], bool],
) -> None:
    rng = random.Random(attempt.__name__)
    translated = [attempt(rng) for _ in range(150)]
    assert sum(translated) > 20
