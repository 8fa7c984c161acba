"""``outrider demo``: the same prompts, plain and speculative, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ..errors import OutriderError
from ..types import Counts, Origin, SamplingParams
from .common import SIGNS, Model, bars, model_folder, open_llm, program, shares, status

if TYPE_CHECKING:
    from ..audit.ties import Difference
    from ..bench.record import Batch, Sample
    from ..llm import LLM

PROMPTS, TOKENS, REPEATS = 6, 96, 3
TEMPERATURE, FIRST_SEED = 0.7, 0
PROMPT_LINES = 3
NARROWEST_COLUMNS = 100
BAR = 40
STYLES = {Origin.ACCEPTED: "green", Origin.BONUS: "cyan", Origin.PLAIN: ""}
TEACHING = (
    "A small drafter proposes, the target checks several tokens at once. [green]accepted draft "
    "tokens[/green] · [cyan]the target's own token after a draft[/cyan] · plain"
)


@dataclass(frozen=True)
class Pair:
    """One prompt, decoded both ways; speeds are decode speeds, tokens a second, one a repeat."""

    prompt: str
    plain: Sample
    speculative: Sample
    plain_speeds: list[float]
    speculative_speeds: list[float]
    differences: list[Difference]

    @property
    def speedup(self) -> float:
        """The median over repeats of the ratio of neighbours in time."""
        both = zip(self.speculative_speeds, self.plain_speeds, strict=True)
        return median(mine / theirs for mine, theirs in both)


def decode(engines: tuple[LLM, LLM], prompt: str, seed: int) -> Pair:
    """Decode a prompt plainly and speculatively, by turns, and compare."""
    from ..audit.ties import compare
    from ..bench.record import run

    params = SamplingParams(temperature=TEMPERATURE, seed=seed, max_tokens=TOKENS, ignore_eos=True)
    one = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    ids, _ = (llm.generate(prompt, one)[0].prompt_token_ids for llm in engines)  # warms up, too
    batches: tuple[list[Batch], list[Batch]] = ([], [])
    for repeat in range(REPEATS):
        for side in (0, 1) if repeat % 2 == 0 else (1, 0):
            batches[side].append(run(engines[side], [ids], [params]))
    plain, speculative = ([b.samples[0] for b in side] for side in batches)
    expected = plain[0].token_ids
    outputs = {tuple(s.token_ids) for s in [*plain, *speculative]}
    compared = [compare(engines[0], ids, params, expected, o, seed=seed) for o in sorted(outputs)]
    slow, fast = ([b.decode_tokens / b.decode_seconds for b in side] for side in batches)
    parted = [d for d in compared if d is not None]
    return Pair(prompt, plain[0], speculative[0], slow, fast, parted)


def coloured(sample: Sample) -> Text:
    """Return a sample's text, each piece in the colour of its origin."""
    return Text.assemble(*((text.translate(SIGNS), STYLES[o]) for text, o in sample.pieces))


def verdict(differences: Sequence[Difference]) -> str:
    """Return whether outputs are identical: yes, yes up to ties, or no."""
    if not all(d.is_tie for d in differences):
        return "no"
    return "yes, up to a numerical tie" if differences else "yes"


def show(console: Console, title: str, pair: Pair) -> None:
    """Print the end of a prompt and its two outputs."""
    console.print(Rule(title, style="dim"))
    start = "".join(pair.prompt.splitlines(keepends=True)[-PROMPT_LINES:])
    left = Text.assemble((start, "dim"), pair.plain.text.translate(SIGNS))
    right = Text.assemble((start, "dim"), coloured(pair.speculative))
    if console.width >= NARROWEST_COLUMNS:
        columns = Table(box=None, expand=True, padding=(0, 2, 0, 0))
        columns.add_column(f"plain, {median(pair.plain_speeds):.0f} tokens/s", ratio=1)
        fast = median(pair.speculative_speeds)
        columns.add_column(f"speculative, {fast:.0f} tokens/s", ratio=1)
        columns.add_row(left, right)
        console.print(columns)
    else:
        console.print(right)
        if pair.differences:
            console.print("[dim]plain:[/dim]")
            console.print(left)
    answer = verdict(pair.differences)
    style = "red" if answer == "no" else "green"
    console.print(f"identical: [{style}]{answer}[/{style}] · {pair.speedup:.2f}x")


def summary(console: Console, pairs: list[Pair]) -> None:
    """Print the result of all prompts: speeds as bars, the answer, and where to go from here."""
    plain = median(median(p.plain_speeds) for p in pairs)
    fast = median(median(p.speculative_speeds) for p in pairs)
    speedup = median(p.speedup for p in pairs)
    counts = Counts()
    for pair in pairs:
        counts.add(pair.speculative.counts)
    length, survival = counts.acceptance_length, counts.acceptance_by_position
    most = max(plain, fast)
    console.print(Rule("together", style="dim"))
    for name, speed, style in (("plain", plain, "white"), ("speculative", fast, "green")):
        bar = "█" * max(1, round(BAR * speed / most))
        console.print(f"{name:<12} [{style}]{bar}[/{style}] {speed:.0f} tokens/s")
    console.print(f"\nidentical: [bold]{verdict([d for p in pairs for d in p.differences])}[/bold]")
    console.print(
        f"speedup: [bold]{speedup:.2f}x[/bold] [dim](median over {len(pairs)} prompts of decode "
        f"speed, (N-1)/(T(N)-T(1)), {REPEATS} runs of each by turns, T = {TEMPERATURE})[/dim]"
    )
    if length is not None:
        console.print(
            f"acceptance length: [bold]{length:.2f}[/bold] [dim](1 + accepted / drafts), accepted "
            f"up to each position:[/dim] {bars(survival)} {shares(survival)}"
        )
    call = program()
    console.print("\nTry next:")
    for command, what in (
        (f'{call} generate "def fibonacci(n):" --stats', "your own prompt, with figures"),
        (f'{call} generate "class Stack:" --seed 7 --drafter none', "with ngram: the same text"),
        (f"{call} bench", "every drafter at T = 0, 0.7 and 1, in a few minutes"),
    ):
        console.print(f"  [bold]{command}[/bold]  [dim]{what}[/dim]")


def demo(model: Model = None) -> None:
    """Decode held-out code plainly and speculatively, side by side."""
    from .. import pocket

    console = Console(highlight=False)
    folder, pairs = model_folder(model), []
    prompts = pocket.prompts()[:PROMPTS]
    engines = tuple(
        open_llm(folder, drafter=d, max_num_seqs=1, enable_prefix_caching=False)
        for d in ("none", "auto")
    )
    console.print(TEACHING)
    for i, prompt in enumerate(prompts):
        with status(f"decoding prompt {i + 1} of {len(prompts)}, {2 * REPEATS} times"):
            pair = decode((engines[0], engines[1]), prompt, FIRST_SEED + i)
        pairs.append(pair)
        show(console, f"prompt {i + 1} of {len(prompts)}", pair)
    summary(console, pairs)
    if not all(d.is_tie for p in pairs for d in p.differences):
        raise OutriderError("the outputs differ by more than numerical ties.")
