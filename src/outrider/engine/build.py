"""Builds an engine: loads checkpoints, sizes memory, wires the parts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from ..base.config import PRESETS, EngineConfig
from ..base.methods import TOGETHER
from ..checkpoints.architecture import Architecture
from ..checkpoints.checkpoint import Checkpoint
from ..drafters.base import Drafter, DrafterContext, DrafterSpec, Needs, NoSpec, memory_of
from ..drafters.mtp import MtpSpec
from ..drafters.ngram import NgramSpec
from ..drafters.prediction import PredictionSpec
from ..drafters.registry import GroupSpec, known_specs
from ..drafters.suffix import SuffixSpec
from ..errors import ConfigError, ModelError
from ..models.base import Model
from ..models.load import cannot_go_back, load_model
from ..models.native import NativeTransformer
from ..sampling.acceptance import AcceptanceRule
from ..sampling.ratio import RULES
from .control.choices import methods_of
from .control.controller import Controller
from .control.costs import CostModel, Costs
from .control.survival import Survival
from .control.tuning import USUAL
from .drafting import overrides
from .engine import Engine
from .experts import expert_costs
from .measure import Steps, find_costs
from .memory import plan_budget
from .setup import EngineSetup
from .spare_skips import is_lone, search_later, skips_file, with_kept

logger = logging.getLogger("outrider")


def load_target(checkpoint: Checkpoint, config: EngineConfig) -> Model:
    """Return the model of a checkpoint on the CPU, see ``load_model``."""
    length = config.model_length(checkpoint.shape.context)
    return load_model(
        checkpoint, config.dtype, "cpu", length, config.quantization,
        activations=config.activations, keeps=config.repack_cache,
        cpus=config.placement and config.placement.target,
        coded_cache=config.coded_cache,
    )  # fmt: skip


def fitting_spec(spec: DrafterSpec, folder: Path, model: Model) -> DrafterSpec:
    """Return ``spec``; if the target cannot go back, NoSpec for ``auto``, else ConfigError."""
    if model.truncates or isinstance(spec, NoSpec):
        return spec
    why = cannot_go_back(folder, model)
    if not spec.auto:
        raise ConfigError(f"{why}, so nothing can be drafted for it; give drafter=None.")
    logger.warning("%s, so it is decoded plainly, without a drafter.", why)
    return NoSpec()


def _that_load(spec: DrafterSpec, context: DrafterContext) -> tuple[DrafterSpec, dict[str, Needs]]:
    """Return ``spec`` without found MTP layers that fail to load, and the needs of those loaded."""
    needs: dict[str, Needs] = {}
    for each in spec.members:
        if isinstance(each, MtpSpec) and each.found:
            try:
                needs[each.name] = each.needs(context)
            except (ConfigError, ModelError) as error:
                logger.warning("auto goes on without the MTP layers in %s: %s", each.folder, error)
                assert isinstance(spec, GroupSpec)
                spec = replace(spec, members=tuple(m for m in spec.members if m is not each))
    return spec, needs


def takes_cpus(spec: DrafterSpec) -> bool:
    """Return True if a drafter's passes can run on CPUs of their own."""
    return any(each.placed for each in spec.members or (spec,))


def _check_placement(config: EngineConfig, spec: DrafterSpec) -> None:
    """Raise ConfigError where ``drafter_cpus`` does not fit this machine or the drafter."""
    if config.placement is not None and not takes_cpus(spec):
        raise ConfigError(
            f"drafter_cpus is {config.drafter_cpus}, but drafter {spec.name!r} has no passes of a "
            "checkpoint of its own that could run there; name such a checkpoint, or leave it out."
        )


def context_of(setup: EngineSetup, target: Model, rule: AcceptanceRule) -> DrafterContext:
    """Return the context from which drafters compute their needs."""
    length = setup.config.model_length(target.shape.context)
    return DrafterContext(target, setup.tokenizes, setup.config, length, rule.needs_logits)


def build_engine(
    setup: EngineSetup,
    *,
    model: Model | None = None,
    rule: AcceptanceRule | None = None,
    known: Mapping[str, Needs] = {},
    freed: int = 0,
) -> Engine:
    """Return the engine of a setup.

    ``model`` is the target if it is loaded already; ``rule`` is ``config.acceptance_rule`` unless
    given. ``known`` are needs of drafters, by name. ``freed`` is that of ``plan_budget``. Raises
    ModelError, ConfigError or MemoryBudgetError if the setup cannot be served.
    """
    config, tokenizes, folder = setup.config, setup.tokenizes, setup.checkpoint.folder
    _check_placement(config, setup.spec)
    target = model or load_target(setup.checkpoint, config)
    rule = RULES[config.acceptance_rule]() if rule is None else rule
    context = context_of(setup, target, rule)
    length = context.max_model_len
    key = {"model": folder, "dtype": str(target.dtype), "quantization": config.quantization}
    key |= {"activations": config.activations}
    skips = skips_file(key)
    spec, own = _that_load(fitting_spec(setup.spec, folder, target), context)
    known = {**own, **known}
    lone = is_lone(spec) and rule.trees and not target.shape.stateful
    if lone:
        spec = with_kept(spec, target, skips)
    lookups = (NgramSpec(), SuffixSpec(), PredictionSpec()) if target.truncates else ()
    specs = {each.name: each for each in (NoSpec(), *lookups, *(spec.members or (spec,)))}
    together = _together(spec, specs, rule.trees and target.trees)
    needs = {name: known.get(name) or each.needs(context) for name, each in specs.items()}
    most = max(map(len, together), default=1)
    budget = plan_budget(config, length, target, needs.values(), most, freed)
    added = [
        f"drafter {name} adds {memory_of(need)}" + (f" ({need.note})" if need.note else "")
        for name, need in needs.items()
        if need.weight_bytes or need.note
    ]
    budget = replace(budget, added=tuple(added))
    drafters = {
        name: each.make(replace(context, num_pages=budget.pages, needs=needs[name]))
        for name, each in specs.items()
    }
    for name, each in drafters.items():
        check_drafter(each, needs[name], rule, target)
    controller, later = None, None
    if target.truncates and (spec.auto or config.num_speculative_tokens is None):
        files = [each.folder for each in specs.values() if each.folder is not None]
        key |= {"drafters": files, "drafter": config.drafter_quantization}
        key |= {"cpus": config.drafter_cpus, "kv_cache_dtype": config.kv_cache_dtype}
        controller, later = _controller(target, drafters, rule, config, together, key, spec.auto)
    portfolio = [each.name for each in spec.members] or [SuffixSpec.name]
    engine = Engine(
        target, drafters, rule, config, budget, length, spec.name, tokenizes, together, portfolio,
        controller,
    )  # fmt: skip
    engine.later = later
    if lone and later and isinstance(target, NativeTransformer):
        depth = config.max_draft_length
        row = _row_cost(engine.chooser.costs.prior, depth)
        engine.later = chain(later, search_later(target, config.page_size, depth, row, skips))
    return engine


def _together(
    spec: DrafterSpec, specs: Mapping[str, DrafterSpec], trees: bool
) -> tuple[tuple[str, ...], ...]:
    """Return the groups of drafters to merge: the members of ``spec``, or pairs for ``auto``."""
    if not spec.members:
        return ()
    if not spec.auto:
        if not trees:
            raise ConfigError(
                f"drafter {spec.name!r} drafts trees, which the acceptance rule or the model "
                "cannot verify; give a single drafter."
            )
        return (tuple(each.name for each in spec.members),)
    lookup = SuffixSpec.name
    neural = [each.name for each in spec.members if each.folder is not None]
    return tuple((name, lookup) for name in neural) if trees else ()


def _controller(
    model: Model,
    drafters: Mapping[str, Drafter],
    rule: AcceptanceRule,
    config: EngineConfig,
    together: Sequence[tuple[str, ...]],
    key: Mapping[str, object],
    auto: bool,
) -> tuple[Controller, Steps[None]]:
    """Return an engine's controller, and the work that measures costs later."""
    trees = rule.trees and model.trees
    # Only auto may use a lookup or the drafter that it is merged with.
    pairs = [(lookup, name) for name, lookup in together] if auto else []
    methods = methods_of(drafters, config.max_draft_length, together, trees, pairs)
    longest = max([each.max_depth * each.width for each in methods.values()], default=0)
    drafting = {name: each for name, each in drafters.items() if name in methods}
    rows = config.max_num_seqs * (1 + longest)
    merging = [*map(TOGETHER.join, together)]
    costs, later = find_costs(model, drafting, merging, config.page_size, rows, key)
    row = _row_cost(costs, config.max_draft_length)
    for drafter in drafting.values():
        drafter.measured(row)
    priors = {name: spec.prior for name, spec in known_specs().items()}
    if config.preset is not None:
        priors = dict.fromkeys(methods, PRESETS[config.preset].accepted)
    wider = {
        name: (
            method.drafters[-1 if method.otherwise else 0],
            USUAL.siblings_share if method.width > 1 else USUAL.second_share,
        )
        for name, method in methods.items()
        if name not in drafters
    }
    shadowed = frozenset(n for n, each in drafting.items() if overrides(each, "peek"))
    shape = model.shape
    mixture = expert_costs(shape) if isinstance(shape, Architecture) else None
    believed = CostModel(costs, mixture=mixture)
    return Controller(believed, Survival(priors, wider), methods, shadowed), later


def _row_cost(costs: Costs, depth: int) -> float:
    """Return the cost of one more row of a verifying forward, in forwards of one row."""
    return (costs.target.at(1 + depth) / costs.target.at(1) - 1) / depth


def check_drafter(drafter: Drafter, needs: Needs, rule: AcceptanceRule, model: Model) -> None:
    """Raise ConfigError if a drafter takes more than its needs, the model or the rule allow."""
    name, family = f"drafter {drafter.name!r}", repr(model.shape.family)
    nodes, layers = drafter.max_nodes, drafter.target_layers
    absent = [layer for layer in layers if not -1 <= layer < model.hidden_layers]
    if nodes > max(drafter.max_length, needs.max_nodes):
        raise ConfigError(
            f"{name} drafts {nodes} nodes, but its needs say max_nodes = {needs.max_nodes}; "
            "correct its needs()."
        )
    if not set(layers) <= set(needs.target_layers):
        raise ConfigError(
            f"{name} wants hidden states of layers {layers}, but its needs say "
            f"{needs.target_layers}; correct its needs()."
        )
    if absent:
        raise ConfigError(
            f"{name} wants the hidden states of layer {absent[0]}, which this {family} model does "
            "not give; use another drafter."
        )
    if nodes > drafter.max_length and not rule.trees:
        raise ConfigError(
            f"acceptance_rule {rule.name!r} cannot verify the trees of {name}; use 'coupled', or "
            "a drafter of chains."
        )
    if nodes > drafter.max_length and not model.trees:
        raise ConfigError(
            f"a {family} model cannot verify the trees of {name}; leave out max_draft_nodes, or "
            "use a drafter of chains."
        )
