"""``outrider drafters``: every drafter that is known, and what it needs, costs and suits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from ..errors import ConfigError, OutriderError
from .commands import FAILED
from .common import AsJson, new_table, report_console, status, write
from .flags import argument, setting
from .spelling import App, hint
from .suggest import suggest

if TYPE_CHECKING:
    from ..drafters.base import DrafterContext, DrafterSpec

UNSAID = "not said"
app = App(default="list")
HOW = (
    "--drafter NAME takes one, NAME+NAME merges the drafts of several into trees, and auto chooses "
    "at each step among the checkpoint beside the model, suffix, a request's prediction and what "
    "is named behind it (auto+NAME). A folder is a name too, as is retokenize:PATH."
)


OF_A_MODEL = (
    "at_hand", "why", "checkpoint", "page_bytes", "fixed_bytes", "weight_bytes", "note", "auto",
)  # fmt: skip
"""Facts that need a model: why a drafter is not at hand, the bytes of its own cache for each page
of the target's, those that come once, and those of weights that the target does not hold too."""
DrafterFacts = dict[str, Any]


def known() -> list[DrafterFacts]:
    """Return the facts of every drafter, those of other packages among them."""
    from ..drafters.registry import known_specs

    about = "wants", "costs", "suits", "options"
    return [
        {"name": name, **{each: getattr(spec, each) for each in about}, **dict.fromkeys(OF_A_MODEL)}
        for name, spec in known_specs().items()
    ]


def at_hand(model: str) -> tuple[list[DrafterFacts], int]:
    """Return every drafter with what a model has of it, and the tokens of a page."""
    from ..base.methods import AUTO
    from ..drafters.base import DrafterContext
    from ..drafters.prediction import PredictionSpec
    from ..drafters.registry import find_drafter
    from ..engine.build import load_target
    from ..engine.setup import set_up

    own = set_up(model, None, {})
    target, folder = load_target(own.checkpoint, own.config), own.checkpoint.folder
    context = DrafterContext(target, own.tokenizes, own.config, own.facts.max_model_len)
    auto = {PredictionSpec.name, *(each.name for each in find_drafter(AUTO, folder).members)}
    rows = [row | _of_model(row["name"], folder, context, auto) for row in known()]
    return rows, own.config.page_size


def _of_model(name: str, target: Path, context: DrafterContext, auto: set[str]) -> DrafterFacts:
    """Return what a drafter takes of this model's engine, or why it cannot; ``auto`` has them."""
    try:
        spec = _spec(name, target, context)
        needs = spec.needs(context)
    except OutriderError as error:
        return {"at_hand": False, "why": str(error), "auto": False}
    return {
        "at_hand": True,
        "checkpoint": None if spec.folder is None else str(spec.folder),
        "page_bytes": needs.page_bytes,
        "fixed_bytes": needs.fixed_bytes,
        "weight_bytes": needs.weight_bytes,
        "note": needs.note or None,
        "auto": name in auto,
    }


def _memory(row: DrafterFacts) -> str:
    """Return in words the memory that a drafter takes, and its note."""
    if not row["at_hand"]:
        return f"not at hand: {row['why']}"
    from ..drafters.base import Needs, memory_of

    memory = memory_of(
        Needs(row["page_bytes"], row["fixed_bytes"], weight_bytes=row["weight_bytes"])
    )
    return f"{memory}; {row['note']}" if row["note"] else memory


def _spec(name: str, target: Path, context: DrafterContext) -> DrafterSpec:
    """Return the drafter of that name for a model, or raise ConfigError or ModelError."""
    from ..drafters.base import NoSpec
    from ..drafters.registry import beside, known_specs
    from ..engine.setup import set_up
    from ..models.load import cannot_go_back

    if name != NoSpec.name and not context.model.truncates:
        raise ConfigError(f"{cannot_go_back(target, context.model)}.")
    spec = known_specs()[name]
    if spec.by_folder and beside(target, name) is None:
        raise ConfigError(
            f"no {spec.kind} in the model's sub-folder or sibling drafter, or sub-folder {name}."
        )
    if not spec.by_folder and spec.recognise(name) is None:
        raise ConfigError("its name alone does not choose it; its package says what does.")
    return set_up(target, name, {}).spec


def table(drafters: list[DrafterFacts], page_size: int | None) -> Table:
    """Return the drafters as a table; the memory they take where a model is given."""
    grid = new_table("drafter", "needs", "costs", "suits")
    grid.columns[0].no_wrap = True
    if page_size is not None:
        grid.add_column(f"memory (pages of {page_size} tokens)", overflow="fold")
        grid.add_column("auto", no_wrap=True)
    for row in drafters:
        cells = [row["name"], *(row[name] or UNSAID for name in ("wants", "costs", "suits"))]
        if page_size is not None:
            cells += [_memory(row), "yes" if row["auto"] else ""]
        grid.add_row(*cells, style="dim" if row["at_hand"] is False else None)
    return grid


@app.callback()
def drafters() -> None:
    """List all drafters; suggest some for a target; check one against it."""


app.command()(suggest)


@app.command("list")
def list_drafters(
    model: str | None = argument(
        "MODEL",
        "Also show which drafters this target has, and the memory of each: "
        "a checkpoint's folder, .gguf file or hub name.",
        None,
    ),
    json_: AsJson = False,
) -> None:
    """List all drafters: what each needs, costs and suits."""
    drafters, page_size = known(), None
    if model is not None:
        with status("loading the model"):
            drafters, page_size = at_hand(model)
    if json_:
        write(json.dumps({"model": model, "page_size": page_size, "drafters": drafters}) + "\n")
        return
    console = report_console(on_stderr=False)
    console.print(table(drafters, page_size))
    for row in drafters:
        if row["options"]:
            console.print(f"Options of {row['name']}: {row['options']}.")
    console.print(HOW)


def _texts() -> list[str]:
    """Return the texts of the bundled workloads."""
    from ..bench.workload import BUNDLED, load_workload

    items = [item for name in BUNDLED for item in load_workload(name).items]
    said = [str(m["content"]) for item in items for m in item.messages]
    return [
        text for text in (*(i.prompt for i in items), *(i.answer for i in items), *said) if text
    ]


@app.command()
def check(
    model: str = argument("MODEL", "The target: a folder or hub name."),
    drafter: str | None = setting(
        None,
        "The drafter's folder or hub name; retokenize:PATH for one with another tokenizer; mtp for "
        "the layers inside the target.",
        metavar="PATH",
    ),
    target: str | None = setting(None, "", hidden=True),
    json_: AsJson = False,
) -> None:
    """Check whether a drafter's checkpoint fits a target; exit with 1 if it does not.

    Only configs, tokenizers and the names and shapes of tensors are read. Of a drafter with another
    tokenizer it says which tokens are shared and what is lost to the others, on bundled texts.
    """
    if target is not None:
        hint("the order is now outrider drafters check MODEL --drafter PATH.")
        model, drafter = target, model
    if drafter is None:
        raise typer.BadParameter("give the drafter to check as --drafter PATH.")
    with status("reading"):
        from ..checkpoints.folders import find_folder
        from ..drafters.check import check as checked
        from ..drafters.check import check_mtp, check_retokenized
        from ..drafters.retokenize import folder_named

        other = folder_named(drafter)
        if drafter == "mtp" and not Path(drafter).exists():
            kind, facts = check_mtp(find_folder(model))
        elif other is None:
            kind, facts = checked(find_folder(drafter), find_folder(model))
        else:
            kind, facts = check_retokenized(find_folder(other), find_folder(model), _texts())
    fits = all(fact.fits for fact in facts)
    if json_:
        rows = [fact._asdict() for fact in facts]
        write(json.dumps({"drafter": kind, "fits": fits, "facts": rows}) + "\n")
    else:
        grid = new_table(f"drafter {kind}", "it has", "the target has", "fits")
        for fact in facts:
            cells = fact.what, fact.drafter, fact.target, "yes" if fact.fits else "no"
            grid.add_row(*cells, style=None if fact.fits else "red")
        report_console(on_stderr=False).print(grid)
    if not fits:
        raise typer.Exit(FAILED)
