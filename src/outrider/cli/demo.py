"""``outrider demo``: the same prompts, plain and speculative, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ..base.types import Origin, SamplingParams
from ..errors import OutriderError
from .beliefs import choice
from .common import SIGNS, Model, bars, model_folder, open_llm, program, screen, shares, status
from .flags import engine_options, with_parameters

if TYPE_CHECKING:
    from ..audit.ties import Difference
    from ..bench.record import Pass
    from ..llm import LLM

PROMPTS, TOKENS, REPEATS = 6, 96, 3
TEMPERATURE, FIRST_SEED = 0.7, 0
PROMPT_LINES = 3
NARROWEST_COLUMNS = 100
BAR = 40
STYLES = {Origin.ACCEPTED: "green", Origin.BONUS: "cyan", Origin.PLAIN: ""}
TEACHING = Text.assemble(
    "Drafters propose tokens, the target verifies several at once, and the engine chooses the "
    "drafter and the draft length at each step. ",
    ("accepted draft tokens", "green"),
    " · ",
    ("the target's own token after a draft", "cyan"),
    " · plain",
)


@dataclass(frozen=True)
class Pair:
    """One prompt, decoded plainly and speculatively by turns, a run a repeat."""

    prompt: str
    plain: list[Pass]
    speculative: list[Pass]
    differences: list[Difference]

    @property
    def speedup(self) -> float:
        """The median over repeats of the ratio of neighbours in time."""
        both = zip(self.speculative, self.plain, strict=True)
        return median(mine.speed / theirs.speed for mine, theirs in both)


def speed(runs: Sequence[Pass]) -> float:
    """Return the median decode speed, in tokens a second."""
    return median(run.speed for run in runs)


def decode(engines: Sequence[LLM], prompt: str, seed: int) -> Pair:
    """Decode a prompt plainly and speculatively, by turns, and compare."""
    from ..audit.ties import compare
    from ..bench.record import run_all

    params = SamplingParams(temperature=TEMPERATURE, seed=seed, max_tokens=TOKENS, ignore_eos=True)
    one = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    ids, _ = (llm.generate(prompt, one)[0].prompt_token_ids for llm in engines)  # warms up, too
    plain: list[Pass] = []
    speculative: list[Pass] = []
    sides = list(zip(engines, (plain, speculative), strict=True))
    for repeat in range(REPEATS):
        for llm, runs in sides if repeat % 2 == 0 else reversed(sides):
            runs.append(run_all(llm, [ids], [params]))
    expected = plain[0].outputs[0]
    outputs = {tuple(run.outputs[0]) for run in [*plain, *speculative]}
    compared = [compare(engines[0], ids, params, expected, o, seed=seed) for o in sorted(outputs)]
    return Pair(prompt, plain, speculative, [d for d in compared if d is not None])


def coloured(run: Pass, styles: Mapping[Origin, str]) -> Text:
    """Return the text of a run, each piece in the style of its origin."""
    (batch,) = run.batches
    pieces = ((e.text.translate(SIGNS), styles.get(e.origin, "")) for e in batch.events)
    return Text.assemble(*pieces)


def verdict(differences: Sequence[Difference]) -> str:
    """Return whether outputs are identical: yes, yes up to ties, or no."""
    if not all(d.is_tie for d in differences):
        return "no"
    return "yes, up to a numerical tie" if differences else "yes"


def show(console: Console, title: str, pair: Pair) -> None:
    """Print the end of a prompt and its two outputs."""
    console.print(Rule(title, style="dim"))
    start = "".join(pair.prompt.splitlines(keepends=True)[-PROMPT_LINES:])
    left = Text.assemble((start, "dim"), coloured(pair.plain[0], {}))
    right = Text.assemble((start, "dim"), coloured(pair.speculative[0], STYLES))
    if console.width >= NARROWEST_COLUMNS:
        columns = Table(box=None, expand=True, padding=(0, 2, 0, 0))
        columns.add_column(f"plain, {speed(pair.plain):.0f} tokens/s", ratio=1)
        columns.add_column(f"speculative, {speed(pair.speculative):.0f} tokens/s", ratio=1)
        columns.add_row(left, right)
        console.print(columns)
    else:
        console.print(right)
        if pair.differences:
            console.print("plain:", style="dim")
            console.print(left)
    answer = verdict(pair.differences)
    style = "red" if answer == "no" else "green"
    console.print(Text.assemble("identical: ", (answer, style), f" · {pair.speedup:.2f}x"))


def summary(console: Console, pairs: list[Pair], believed: Mapping[str, Any] | None) -> None:
    """Print the result of all prompts, what the engine believes, and where to go from here."""
    from ..bench.record import total

    plain = median(speed(pair.plain) for pair in pairs)
    fast = median(speed(pair.speculative) for pair in pairs)
    counts = total(pair.speculative[0].counts for pair in pairs)
    survival = counts.acceptance_by_position
    console.print(Rule("together", style="dim"))
    for name, rate, style in (("plain", plain, "white"), ("speculative", fast, "green")):
        bar = "█" * max(1, round(BAR * rate / max(plain, fast)))
        console.print(Text.assemble(f"{name:<12} ", (bar, style), f" {rate:.0f} tokens/s"))
    same = verdict([d for p in pairs for d in p.differences])
    console.print(Text.assemble("\nidentical: ", (same, "bold")))
    definition = (
        f" (median over {len(pairs)} prompts of decode speed, (N-1)/(T(N)-T(1)), {REPEATS} runs "
        f"of each by turns, T = {TEMPERATURE})"
    )
    speedup = f"{median(pair.speedup for pair in pairs):.2f}x"
    console.print(Text.assemble("speedup: ", (speedup, "bold"), (definition, "dim")))
    if counts.drafts:
        length = (f"{counts.acceptance_length:.2f}", "bold")
        means = (" (1 + accepted / drafts), accepted up to each position:", "dim")
        figures = f" {bars(survival)} {shares(survival)}"
        console.print(Text.assemble("acceptance length: ", length, means, figures))
    if believed is not None:
        chosen = "; ".join(map(choice, believed["choices"]))
        console.print(Text.assemble("the engine's last choice: ", (chosen, "bold")))
    call = program()
    console.print("\nTry next:")
    for command, what in (
        (f'{call} generate "def fibonacci(n):" --stats', "your own prompt, with figures"),
        (f'{call} generate "class Stack:" --seed 7 --drafter ngram', "with ngram: the same text"),
        (f"{call} bench --explain", "all drafters, and what the engine expects of them"),
    ):
        console.print(Text.assemble("  ", (command, "bold"), "  ", (what, "dim")))


@with_parameters(engine_options("threads"))
def demo(model: Model = None, **options: Any) -> None:
    """Decode held-out code plainly and speculatively, side by side."""
    from .. import pocket

    console = screen()
    folder, pairs = model_folder(model), []
    prompts = pocket.prompts()[:PROMPTS]
    engines = [
        open_llm(folder, drafter=d, max_num_seqs=1, enable_prefix_caching=False, **options)
        for d in ("none", "auto")
    ]
    console.print(TEACHING)
    for i, prompt in enumerate(prompts):
        with status(f"decoding prompt {i + 1} of {len(prompts)}, {2 * REPEATS} times"):
            pair = decode(engines, prompt, FIRST_SEED + i)
        pairs.append(pair)
        show(console, f"prompt {i + 1} of {len(prompts)}", pair)
    summary(console, pairs, engines[1].engine.beliefs)
    if not all(d.is_tie for p in pairs for d in p.differences):
        raise OutriderError("the outputs differ by more than numerical ties.")
