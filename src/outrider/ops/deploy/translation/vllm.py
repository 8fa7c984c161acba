"""Commands of vLLM, and of TGI, as today's ``vllm serve``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ....base.methods import find_method, suggested_method
from ....errors import ConfigError, shown
from ..capabilities import find, schema, versions
from ..launch import Launch, Value
from .rules import Change, Rule, table
from .variables import NUMBER, json_of, plain
from .variables import known as known_word
from .words import Command, count, number, options

LARGEST_BATCH = 1024
"""Where a schedule ends unless --max-num-seqs says it; vLLM carries its last range on."""
ALIASES = {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size"}
NGRAM = ("[ngram]", "ngram")
GONE = ("medusa", "mlp-speculator", "mlp_speculator", "-accelerator")
SERVERS = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server")


def is_vllm(words: list[str]) -> bool:
    """Return whether words start vLLM's server."""
    started = words[:2] == ["vllm", "serve"] or any(module in words[:4] for module in SERVERS)
    return started or (bool(words) and words[0].startswith("-"))


def is_tgi(words: list[str]) -> bool:
    """Return whether words start TGI."""
    return bool(words) and words[0].rpartition("/")[2] == "text-generation-launcher"


def serve(words: list[str]) -> tuple[Launch, list[Change]]:
    """Return today's launch of a vLLM command, and what changed.

    Raises:
        ConfigError: it names no model, or drafts in a way that vLLM has no more.
    """
    rules, known = table("vllm").rules, schema("vllm")["options"]
    switches = {n for n, kind in known.items() if kind == "bool"}
    switches |= {n for n, rule in rules.items() if rule.switch}
    old_server = next((module for module in SERVERS if module in words[:4]), None)
    if old_server is not None:  # python -m MODULE
        words = words[words.index(old_server) + 1 :]
    elif words[:2] == ["vllm", "serve"]:
        words = words[2:]
    command = options(words, switches, _canonical)
    changes = []
    if old_server is not None:
        changes.append(Change(f"python -m {old_server}", "vllm serve", "the documented entry"))
    model = command.get("--model") or _argument(command)
    if command.has("--model"):
        why = "vllm serve takes the model as its argument"
        changes.append(Change(f"--model {model}", f"vllm serve {model}", why))
    chosen: dict[str, Value] = {}
    config: dict[str, Any] = {}
    for flag, value in command.options:
        if flag in rules:
            _apply(rules[flag], value, chosen, config, changes)
        elif flag == "--model":
            continue
        elif flag in known:
            _keep(flag, value, known, chosen, changes)
        else:
            changes.append(_unknown(flag))
    more = [word for word in command.program if word != model and not known_word(word)]
    return _finished(model, chosen, config, changes, more)


def tgi(words: list[str]) -> tuple[Launch, list[Change]]:
    """Return the ``vllm serve`` that does what a TGI command did, and what changed.

    Raises:
        ConfigError: it names no model.
    """
    rules = table("tgi").rules
    command = options(words, {n for n, rule in rules.items() if rule.switch}, _canonical)
    model = command.get("--model-id")
    if model is None:
        raise ConfigError("The command of TGI names no model; add --model-id.")
    chosen: dict[str, Value] = {}
    config: dict[str, Any] = {}
    changes: list[Change] = []
    for flag, value in command.options:
        rule = rules.get(flag)
        if rule is None:
            changes.append(Change(flag, "nothing", "no counterpart is known; it is left out"))
        elif rule.option == "MODEL":
            changes.append(Change(flag, model, rule.why))
        elif rule.why == "unchanged":
            chosen[flag] = value
        else:
            _apply(rule, value, chosen, config, changes)
    if config:
        config = {"method": "ngram", **config}
    return _finished(model, chosen, config, changes)


def _argument(command: Command) -> str:
    """Return the model where it is an argument, not an option."""
    if not command.program:
        raise ConfigError("The command of vLLM names no model; give it after vllm serve.")
    return command.program[0]


def _canonical(flag: str) -> str:
    return ALIASES.get(flag, flag.replace("_", "-"))


def _apply(
    rule: Rule,
    value: str | bool,
    chosen: dict[str, Value],
    config: dict[str, Any],
    changes: list[Change],
) -> None:
    old = rule.old if value is True else f"{rule.old} {value}"
    if rule.key is not None:
        config[rule.key] = typed(rule.key, value)
    elif rule.option is not None:
        chosen[rule.option] = rule.value or value
    changes.append(Change(old, rule.new, rule.why))


def typed(key: str, value: str | bool) -> Any:
    """Return the value of a key of ``speculative_config`` in its recorded type.

    Raises:
        ConfigError: it is no number where one is due.
    """
    kind = schema("vllm")["nested"]["speculative_config"][key]
    whole = kind == "int" or key == "num_speculative_tokens_per_batch_size"
    if not whole or value is True:
        return value
    return count(value, key) if known_word(value) else f"{NUMBER}{value}"


def _keep(
    flag: str,
    value: str | bool,
    known: Mapping[str, str],
    chosen: dict[str, Value],
    changes: list[Change],
) -> None:
    """Keep an option that exists today; a switch takes no value any more."""
    if known[flag] == "bool" and not known_word(value):
        raise ConfigError(
            f"{flag} is {plain(str(value))}, and switches take no value any more; write {flag} or "
            f"--no-{flag[2:]}."
        )
    if known[flag] == "bool" and value is not True:
        off = str(value).lower() in ("false", "0", "no")
        new = f"--no-{flag[2:]}" if off else flag
        changes.append(Change(f"{flag}={value}", new, "switches take no value"))
        flag, value = new, True
    chosen[flag] = value


def _unknown(flag: str) -> Change:
    version = versions("vllm")[0]
    return Change(flag, "nothing", f"vLLM {version} has no such option; look up what it was for")


def _today(stated: str, changes: list[Change]) -> str:
    """Return vLLM's current name of a method.

    Raises:
        ConfigError: vLLM no longer has the method.
    """
    known, method = find("vllm"), find_method(stated)
    if method is None or stated in known.methods.values():
        return stated
    if method.name not in known.methods:
        raise ConfigError(
            f"{known.title} {known.version} has no method {method.name}; it has "
            f"{', '.join(known.methods)}."
        )
    if method.name != "mtp":
        return stated  # another name of vLLM's own, such as ngram_gpu
    changes.append(Change(f"method {stated}", "method mtp", "one name for all such heads"))
    return "mtp"


def _finished(
    model: str,
    chosen: dict[str, Value],
    config: dict[str, Any],
    changes: list[Change],
    more: Sequence[str] = (),
) -> tuple[Launch, list[Change]]:
    """Return the launch; ``more`` are variables whose words stand behind the model."""
    usual = {"--max-num-seqs": LARGEST_BATCH, "--tensor-parallel-size": 1}
    usual["--pipeline-parallel-size"] = 1
    batch, tensor, _ = (number(chosen.get(flag, each), flag) for flag, each in usual.items())
    config = with_target_gpus(current(config, batch or LARGEST_BATCH, changes), tensor, changes)
    if config and "--speculative-config" in chosen:
        raise ConfigError("The command has --speculative-config and old flags beside it; keep one.")
    if config:
        chosen["--speculative-config"] = json_of(config)
    return Launch(("vllm", "serve", model, *more), chosen, ("", "")), changes


def with_target_gpus(
    config: dict[str, Any], tensor: int | None, changes: list[Change]
) -> dict[str, Any]:
    """Return a ``speculative_config`` whose drafter runs on the target's GPUs, None if unknown.

    Raises:
        ConfigError: vLLM never accepted its size.
    """
    key = "draft_tensor_parallel_size"
    own = config.get(key, tensor)
    if own == tensor or not isinstance(own, int) or (tensor is None and own != 1):
        return config
    if own != 1:
        raise ConfigError(
            f"The drafter's tensor parallel size is {own}; vLLM took 1 or the target's, {tensor}."
        )
    gpus = "GPUs" if tensor is None else f"{tensor} GPUs"
    why = f"the drafter runs on the target's {gpus}: model runner V1 refuses another size"
    changes.append(Change(f"speculative_config.{key} 1", "nothing", why))
    return {name: value for name, value in config.items() if name != key}


def current(config: dict[str, Any], batch: int, changes: list[Change]) -> dict[str, Any]:
    """Return a ``speculative_config`` of old values as vLLM wants it today.

    Raises:
        ConfigError: it drafts in a way that vLLM has no more, or without a length.
    """
    if not config:
        return {}
    model = config.get("model")
    if isinstance(model, str) and any(word in model.lower() for word in GONE):
        raise ConfigError(
            f"The drafter {shown(model)} is a Medusa or MLP head by its name, and vLLM "
            f"{versions('vllm')[0]} has neither (0.32.0 still did); take an EAGLE-3 head, or serve "
            "Medusa's heads with Outrider."
        )
    if "method" in config:
        config = {**config, "method": _today(config["method"], changes)}
    lookup = "prompt_lookup_max" in config or "prompt_lookup_min" in config
    if model in NGRAM or (model is None and lookup):
        config = {"method": "ngram", **{k: v for k, v in config.items() if k != "model"}}
    elif model is not None and "method" not in config:
        method = suggested_method(str(model))
        config = {"method": method, **config}
        why = "said here, since vLLM would guess it from name and config; check it"
        changes.append(Change("(no method)", f"method {method}", why))
    length = config.get("num_speculative_tokens")
    if length is None and config.get("method") in ("draft_model", "ngram"):
        raise ConfigError("A drafter is named, but no num_speculative_tokens; add the length K.")
    if isinstance(length, int) and length < 1:
        raise ConfigError(
            f"num_speculative_tokens is {length}; give 1 or more, or drop the drafter."
        )
    above = config.get("num_speculative_tokens_per_batch_size")
    if isinstance(above, int) and isinstance(length, int):
        ranges = [[1, above, length], [above + 1, max(batch, above + 1), 0]]
        config["num_speculative_tokens_per_batch_size"] = ranges
    elif above is not None:
        raise ConfigError(
            "A batch size above which nothing drafts becomes a schedule only if it and the draft "
            "length are numbers; write them as numbers."
        )
    return config
