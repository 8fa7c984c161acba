"""Translates commands of vLLM and TGI to the current ``vllm serve``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from ....base.methods import find_method, suggested_method
from ....errors import ConfigError, shown
from ..capabilities import find, schema, versions
from ..engines import Launch, Value
from .rules import Changes, OptionRule, rules_of
from .shell import NUMBER, ShellCommand, count, json_of, known, number, options, plain

LARGEST_BATCH = 1024
"""The last batch size of a schedule without --max-num-seqs; vLLM extends the last range."""
ALIASES = {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size"}
NGRAM = ("[ngram]", "ngram")
GONE = ("medusa", "mlp-speculator", "mlp_speculator", "-accelerator")
SERVERS = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server")
SCHEDULE = "num_speculative_tokens_per_batch_size"


def is_vllm(words: list[str]) -> bool:
    """Return whether words start vLLM's server."""
    started = words[:2] == ["vllm", "serve"] or any(module in words[:4] for module in SERVERS)
    return started or (bool(words) and words[0].startswith("-"))


def serve(words: list[str]) -> tuple[Launch, Changes]:
    """Return the current launch for a vLLM command, and what changed."""
    today = _Today("vllm")
    old_server = next((module for module in SERVERS if module in words[:4]), None)
    if old_server is not None:  # python -m MODULE
        words = words[words.index(old_server) + 1 :]
        today.changes.note("server", module=old_server)
    elif words[:2] == ["vllm", "serve"]:
        words = words[2:]
    command = today.command(words, {n for n, kind in today.known.items() if kind == "bool"})
    model = command.get("--model") or next(iter(command.program), None)
    if model is None:
        raise ConfigError("The command of vLLM names no model; give it after vllm serve.")
    if command.has("--model"):
        today.changes.note("model", model=model)
    for flag, value in command.options:
        if flag in today.rules:
            today.apply(today.rules[flag], value)
        elif flag == "--model":
            continue
        elif flag in today.known:
            today.keep(flag, value)
        else:
            today.changes.note("no_option", flag=flag, version=versions("vllm")[0])
    more = [word for word in command.program if word != model and not known(word)]
    return today.launch(model, more), today.changes


def tgi(words: list[str]) -> tuple[Launch, Changes]:
    """Return the ``vllm serve`` that replaces a TGI command, and what changed."""
    today = _Today("tgi")
    command = today.command(words)
    model = command.get("--model-id")
    if model is None:
        raise ConfigError("The command of TGI names no model; add --model-id.")
    for flag, value in command.options:
        rule = today.rules.get(flag)
        if rule is None:
            today.changes.note("no_counterpart", flag=flag)
        elif rule.option == "MODEL":
            today.changes.add(flag, model, rule.why)
        elif rule.why == "unchanged":
            today.chosen[flag] = value
        else:
            today.apply(rule, value)
    if today.config:
        today.config = {"method": "ngram", **today.config}
    return today.launch(model), today.changes


class _Today:
    """Collects the options of the current command, its ``speculative_config``, and the changes."""

    def __init__(self, source: str) -> None:
        self.rules, self.known = rules_of(source), schema("vllm")["options"]
        self.chosen: dict[str, Value] = {}
        self.config: dict[str, Any] = {}
        self.changes = Changes()

    def command(self, words: list[str], switches: Collection[str] = ()) -> ShellCommand:
        """Return a command; flags without value are ``switches`` and those of the rules."""
        own = {name for name, rule in self.rules.items() if rule.switch}
        return options(words, own.union(switches), lambda f: ALIASES.get(f, f.replace("_", "-")))

    def apply(self, rule: OptionRule, value: str | bool) -> None:
        """Translate an old option by its rule."""
        if rule.key is not None:
            self.config[rule.key] = typed(rule.key, value)
        elif rule.option is not None:
            self.chosen[rule.option] = rule.value or value
        old = rule.old if value is True else f"{rule.old} {value}"
        self.changes.add(old, rule.new, rule.why)

    def keep(self, flag: str, value: str | bool) -> None:
        """Keep an option that still exists; a switch no longer takes a value."""
        if self.known[flag] == "bool" and not known(value):
            raise ConfigError(
                f"{flag} is {plain(str(value))}, and switches take no value any more; write "
                f"{flag} or --no-{flag[2:]}."
            )
        if self.known[flag] == "bool" and value is not True:
            off = str(value).lower() in ("false", "0", "no")
            new = f"--no-{flag[2:]}" if off else flag
            self.changes.note("switch", flag=flag, value=value, new=new)
            flag, value = new, True
        self.chosen[flag] = value

    def launch(self, model: str, more: Sequence[str] = ()) -> Launch:
        """Return the launch; ``more`` are variables that expand to words after the model."""
        sizes = {"--max-num-seqs": LARGEST_BATCH, "--tensor-parallel-size": 1,
                 "--pipeline-parallel-size": 1}  # fmt: skip
        batch, tensor, _ = (number(self.chosen.get(f, each), f) for f, each in sizes.items())
        config = current(self.config, batch or LARGEST_BATCH, self.changes)
        config = with_target_gpus(config, tensor, self.changes)
        if config and "--speculative-config" in self.chosen:
            raise ConfigError(
                "The command has --speculative-config and old flags beside it; keep one."
            )
        if config:
            self.chosen["--speculative-config"] = json_of(config)
        return Launch(("vllm", "serve", model, *more), self.chosen, ("", ""))


def typed(key: str, value: str | bool) -> Any:
    """Return the value of a key of ``speculative_config`` in its recorded type."""
    whole = schema("vllm")["nested"]["speculative_config"][key] == "int" or key == SCHEDULE
    if not whole or value is True:
        return value
    return count(value, key) if known(value) else f"{NUMBER}{value}"


def with_target_gpus(
    config: dict[str, Any], tensor: int | None, changes: Changes
) -> dict[str, Any]:
    """Return the config with the drafter on the target's ``tensor`` GPUs (None if unknown)."""
    key = "draft_tensor_parallel_size"
    own = config.get(key, tensor)
    if own == tensor or not isinstance(own, int) or (tensor is None and own != 1):
        return config
    if own != 1:
        raise ConfigError(
            f"The drafter's tensor parallel size is {own}; vLLM took 1 or the target's, {tensor}."
        )
    changes.note("drafter_gpus", gpus="GPUs" if tensor is None else f"{tensor} GPUs")
    return {name: value for name, value in config.items() if name != key}


def current(config: dict[str, Any], batch: int, changes: Changes) -> dict[str, Any]:
    """Return a ``speculative_config`` with old values in vLLM's current form."""
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
        config = {**config, "method": _method_today(config["method"], changes)}
    lookup = "prompt_lookup_max" in config or "prompt_lookup_min" in config
    if model in NGRAM or (model is None and lookup):
        config = {"method": "ngram", **{k: v for k, v in config.items() if k != "model"}}
    elif model is not None and "method" not in config:
        config = {"method": suggested_method(str(model)), **config}
        changes.note("no_method", method=config["method"])
    length, above = config.get("num_speculative_tokens"), config.get(SCHEDULE)
    if length is None and config.get("method") in ("draft_model", "ngram"):
        raise ConfigError("A drafter is named, but no num_speculative_tokens; add the length K.")
    if isinstance(length, int) and length < 1:
        raise ConfigError(
            f"num_speculative_tokens is {length}; give 1 or more, or drop the drafter."
        )
    if isinstance(above, int) and isinstance(length, int):
        config[SCHEDULE] = [[1, above, length], [above + 1, max(batch, above + 1), 0]]
    elif above is not None:
        raise ConfigError(
            "A batch size above which nothing drafts becomes a schedule only if it and the draft "
            "length are numbers; write them as numbers."
        )
    return config


def _method_today(stated: str, changes: Changes) -> str:
    """Return vLLM's current name of a method."""
    vllm, method = find("vllm"), find_method(stated)
    if method is None or stated in vllm.methods.values():
        return stated
    if method.name not in vllm.methods:
        raise ConfigError(
            f"{vllm.title} {vllm.version} has no method {method.name}; it has "
            f"{', '.join(vllm.methods)}."
        )
    if method.name != "mtp":
        return stated  # another name of vLLM's own, such as ngram_gpu
    changes.note("mtp", method=stated)
    return "mtp"
