"""``outrider explain``: one decode step of a real prompt, token by token."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .common import SIGNS, AsJson, Model, model_folder, open_llm, screen, status, write
from .flags import engine_options, setting, with_parameters

if TYPE_CHECKING:
    from ..audit.explain import ExplainedCandidate, Explanation, Position

HELD_OUT = 22  # of the bundled prompts
BEFORE = 6  # lines of the text that are shown
TOKEN = 18  # columns
LIKELIEST = 5
STYLES = {
    "accepted": "green", "rejected": "red", "bonus": "cyan", "plain": "bold", "dropped": "dim",
    "ended": "dim",
}  # fmt: skip
CHOICES = {
    (True, True): "both", (True, False): "target", (False, True): "drafter", (False, False): "",
}  # fmt: skip
"""Who chose a token, by whether the target did and the drafter."""
GLOSSARY = (
    "distribution: the probabilities of the next token, p of the target and q of the drafter; "
    "noise g: a random number for each token, fixed by seed and position; "
    "accepted: the target draws the draft token, too; "
    "bonus: the target's own token, which ends the step."
)


def introduction(step: Explanation) -> str:
    """Return the explanation of a step for a newcomer."""
    if step.drafter == "none":
        return "Without a drafter, a step is one pass of the target for one token."
    from ..drafters.registry import known_specs

    spec = known_specs().get(step.drafter)
    proposes = (spec and spec.proposes) or f"{step.drafter}, proposes up to {{k}} tokens"
    if not step.temperature:
        draw = "At temperature 0 no noise is drawn: the likeliest token wins."
    else:
        drawn = any(c.q is not None for p in step.positions for c in p.candidates)
        who = "both draw with the same" if drawn or step.drafter == "model" else "it draws with"
        draw = (
            f"At each position {who} random noise g: the highest log probability + g wins, which "
            "is an exact draw from the distribution."
        )
    return (
        f"In one step the drafter, {proposes.format(k=step.num_speculative_tokens)}. The target, "
        "the model that writes the text, computes its distribution (the probabilities of the next "
        f"token) at every position in one pass. {draw} A draft token is accepted if the target "
        "draws the same one. At the first that differs, the target's token is emitted and the rest "
        "of the draft is dropped. So the text is the same as without a drafter, and comes sooner."
    )


def shortened(text: str) -> str:
    """Return a token's text, short enough for its column."""
    return text if len(text) <= TOKEN else text[: TOKEN - 1] + "…"


def shown(position: Position) -> list[ExplainedCandidate]:
    """Return the target's likeliest tokens and those that were chosen."""
    chosen = {position.target.id, position.draft.id if position.draft else None}
    return [
        c for i, c in enumerate(position.candidates) if c.id in chosen or (i < LIKELIEST and c.p)
    ]


def distributions(position: Position) -> Table:
    """Return probabilities, noise and scores of a position, a token a line."""
    from ..audit.explain import label

    rows = shown(position)
    drafts = any(c.q is not None for c in rows)
    noisy = any(c.noise is not None for c in rows)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("  token", no_wrap=True, min_width=TOKEN + 2)
    columns = {
        "p": True, "q": drafts, "noise g": noisy, "log p + g": noisy,
        "log q + g": noisy and drafts,
    }  # fmt: skip
    names = [name for name, there in columns.items() if there]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("choice of", no_wrap=True)
    for c in rows:
        figures = {
            "p": f"{c.p:.3f}",
            "q": f"{c.q or 0:.3f}",
            "noise g": f"{c.noise or 0:.2f}",
            "log p + g": "never" if c.target_score is None else f"{c.target_score:.2f}",
            "log q + g": "never" if c.drafter_score is None else f"{c.drafter_score:.2f}",
        }
        drafted = position.draft is not None and c.id == position.draft.id
        chosen = c.id == position.target.id, drafted
        choice, outcome = CHOICES[chosen], position.outcome
        if outcome == "rejected" and chosen[0]:
            outcome = "bonus"
        cells = [f"  {shortened(label(c))}", *(figures[name] for name in names), choice]
        table.add_row(*(Text(cell, STYLES[outcome] if choice else "") for cell in cells))
    return table


def show(console: Console, explanation: Explanation) -> None:
    """Print the step for people."""
    from ..audit.explain import label

    console.print(f"{introduction(explanation)}\n")
    console.print(
        f"Step {explanation.step} (temperature {explanation.temperature:g}, seed "
        f"{explanation.seed}). {explanation.chosen}"
    )
    console.print("\nThe text before:", style="dim")
    for line in explanation.text_before.translate(SIGNS).split("\n")[-BEFORE:]:
        console.print(Text(f"  | {line}", "dim"), overflow="ellipsis", no_wrap=True)
    for position in explanation.positions:
        outcome, whose = position.outcome, "draft" if position.draft else "target"
        token = label(position.draft or position.target)
        where = f"\n{position.index}  {whose} {token}: "
        said = (outcome.upper(), STYLES[outcome] + " bold")
        console.print(Text.assemble((where, "bold"), said, f". {position.why}"))
        if outcome not in ("dropped", "ended"):
            console.print(distributions(position))
    out = Text("\nOutput: ", "bold")
    for i, each in enumerate(explanation.output):
        out.append(" · " if i else "")
        out.append(f"{label(each)} {each.origin}", STYLES[each.origin])
    console.print(out)
    console.print(f"{explanation.summary}\n", style="bold")
    console.print(GLOSSARY, style="dim")


@with_parameters(engine_options("drafter", "num_speculative_tokens", "threads"))
def explain(
    model: Model = None,
    prompt: str | None = setting(
        None, "Text to continue; a bundled piece of held-out code unless given.", metavar="TEXT"
    ),
    temperature: float = setting(0.8, "0 takes the most likely token."),
    seed: int = setting(0, "Seed of the noise; another seed gives another text."),
    step: int | None = setting(
        None,
        "Number of the step after the prompt. Unless given, the first with both an accepted and a "
        "rejected token.",
    ),
    json_: AsJson = False,
    **options: Any,
) -> None:
    """Show one decode step token by token: draft, probabilities, noise and verdict."""
    from .. import pocket

    text = pocket.prompts()[HELD_OUT] if prompt is None else prompt
    llm = open_llm(model_folder(model), max_num_seqs=1, **options)
    from ..audit.explain import explain as take_apart

    with status("decoding up to the step"):
        explanation = take_apart(llm, text, temperature, seed, step)
    if json_:
        write(json.dumps(asdict(explanation)) + "\n")
        return
    console = screen()
    with console.capture() as printed:
        show(console, explanation)
    write("".join(f"{line.rstrip(' ')}\n" for line in printed.get().splitlines()))
