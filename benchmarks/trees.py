"""Trees beside chains: what their rows cost, and what they bring.

First the time of the target's forward over one sequence's next row and a draft of so many nodes, as
a chain and as a tree whose nodes have three children each, behind contexts of different lengths;
medians over interleaved rounds. Then decoding with the model drafter: chains of several lengths and
trees of several sizes, interleaved. The best chain and the best tree at a temperature are picked by
the odd rounds and compared on the even ones, so that no luck in picking counts.
"""

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Annotated, Any, NamedTuple

import typer

from outrider.base.types import SamplingParams, SequenceState
from outrider.bench.intervals import median_interval, shown
from outrider.bench.machine import machine
from outrider.bench.record import Pass, run_all, total
from outrider.checkpoints.families import find_folder
from outrider.cli.common import JsonFile, numbers, write_json
from outrider.cli.common import shapes as read_shapes
from outrider.errors import ConfigError, OutriderError
from outrider.llm import LLM
from outrider.models.base import Store
from outrider.models.decide import SampleInput
from outrider.models.rows import Segment

from .common import POCKET, PROMPTS, Prompts, Tokens, measured, ratio, read_prompts, table
from .context import lengthened

BRANCHES = 3
"""Children of a node where forwards are measured."""
REPEATS = 5
"""Forwards of a round, of which the fastest counts."""
ROWS = ("context", "nodes", "chain ms", "tree ms", "tree / chain")
DRAFTS = ("temperature", "draft", "tokens/s", "acceptance length")


class Shape(NamedTuple):
    """The shape of drafts: ``nodes`` in all, 0 for chains, and tokens of depth."""

    depth: int
    nodes: int = 0

    def __str__(self) -> str:
        return f"{self.nodes} nodes, {self.depth} deep" if self.nodes else f"K = {self.depth}"


def parents_of(nodes: int, tree: bool) -> list[int]:
    """Return the parents of a chain, or of a tree that is filled level by level."""
    if not tree:
        return [*range(-1, nodes - 1)]
    return [node // BRANCHES - 1 for node in range(nodes)]


def forwards(llm: LLM, contexts: Sequence[int], nodes: Sequence[int], rounds: int) -> list[Any]:
    """Return the times of forwards by context and nodes, as a chain and as a tree.

    Raises:
        ConfigError: the model verifies no trees.
    """
    if not llm.engine.model.trees:
        family = llm.engine.model.shape.family
        raise ConfigError(f"a {family!r} model has no native path and verifies chains only.")
    read = {context: read_context(llm, context, max(nodes)) for context in contexts}
    cells = {
        (context, count, tree): partial(forward, llm, *read[context], parents_of(count, tree))
        for context in contexts
        for count in nodes
        for tree in (False, True)
    }
    found = measured(cells, rounds)
    report: list[Any] = []
    for context in contexts:
        for count in nodes:
            chain, tree = (found[context, count, shape] for shape in (False, True))
            medians = {"chain_ms": median(chain), "tree_ms": median(tree)}
            report.append({"context": context, "nodes": count, **medians, **ratio(tree, chain)})
    return report


def read_context(llm: LLM, context: int, room: int) -> tuple[Store, SequenceState]:
    """Return a sequence of so many tokens and a cache that holds all but the last of them.

    The sequence has pages for ``room`` more.
    """
    model, size, step = llm.engine.model, llm.config.page_size, llm.config.max_num_batched_tokens
    tokens = [i % model.shape.vocab_size for i in range(context)]
    state = llm.inputs.request(tokens, SamplingParams(temperature=0, max_tokens=1))
    (sequence,) = llm.engine.prepare(state.request)
    sequence.pages.extend(range(1, 2 + (context + room) // size))
    store = model.new_store(len(sequence.pages) + 1, size)
    for start in range(0, context - 1, step):
        part = tokens[start : min(start + step, context - 1)]
        model.run([Segment(part, start, sequence.pages, 0, context, key=sequence.id)], store)
    return store, sequence


def forward(llm: LLM, store: Store, sequence: SequenceState, parents: list[int], _: int) -> float:
    """Return the milliseconds of a step's forward over the last token and a draft behind it."""
    start, nodes = len(sequence.tokens) - 1, sequence.tokens[: len(parents)]
    nodes += [0] * (len(parents) - len(nodes))
    segment = Segment(
        sequence.tokens[-1:], start, sequence.pages, 1 + len(nodes), sequence.prompt_length,
        nodes, parents, sequence.id,
    )  # fmt: skip
    took: list[int] = []
    for _ in range(REPEATS):
        begin = time.perf_counter_ns()
        llm.engine.model.decide([segment], store, [SampleInput(sequence)], llm.engine.noise)
        took.append(time.perf_counter_ns() - begin)
    return min(took) / 1e6


def open_engines(model: str, drafter: str, shapes: Sequence[Shape]) -> dict[int, LLM]:
    """Return engines by the nodes of their drafts, which engines cannot change later."""
    depths: dict[int, int] = {}
    for shape in shapes:
        depths[shape.nodes] = max(shape.depth, depths.get(shape.nodes, 0))
    return {
        nodes: LLM(
            model, drafter, num_speculative_tokens=depth, max_draft_nodes=nodes or None,
            max_num_seqs=1, enable_prefix_caching=False,
        )
        for nodes, depth in depths.items()
    }  # fmt: skip


def decode(llm: LLM, depth: int, prompts: Sequence[str], params: SamplingParams, _: int) -> Pass:
    """Continue every prompt, one after the other."""
    llm.set_speculation(replace(llm.speculation, num_speculative_tokens=depth))
    gc.collect()
    return run_all(llm, prompts, [params] * len(prompts))


def drafts(
    engines: Mapping[int, LLM], shapes: Sequence[Shape], prompts: Sequence[str],
    temperatures: Sequence[float], tokens: int, rounds: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return speed and acceptance of every shape, and the best ones, by temperature.

    Raises:
        OutriderError: outputs differ.
    """
    report: list[dict[str, Any]] = []
    for temperature in temperatures:
        params = SamplingParams(temperature=temperature, max_tokens=tokens, seed=1, ignore_eos=True)
        runs = measured(
            {s: partial(decode, engines[s.nodes], s.depth, prompts, params) for s in shapes}, rounds
        )
        outputs = runs[shapes[0]][0].outputs
        if any(run.outputs != outputs for each in runs.values() for run in each):
            raise OutriderError(f"outputs differ at temperature {temperature:g}.")
        speeds = {shape: [run.speed for run in each] for shape, each in runs.items()}
        accepted = {shape: total(run.counts for run in each) for shape, each in runs.items()}
        report.append(
            {
                "temperature": temperature,
                "drafts": [
                    {
                        **shape._asdict(),
                        "tokens_per_second": median(speeds[shape]),
                        "tokens_per_second_interval": median_interval(speeds[shape]),
                        "acceptance_length": accepted[shape].acceptance_length,
                    }
                    for shape in shapes
                ],
                **best(speeds),
            }
        )
    return report


def best(speeds: Mapping[Shape, Sequence[float]]) -> dict[str, Any]:
    """Return the fastest chain and tree of the odd rounds, and tree / chain in the even ones."""
    chain, tree = (
        max((s for s in speeds if bool(s.nodes) == trees), key=lambda s: median(speeds[s][1::2]))
        for trees in (False, True)
    )
    found = ratio(speeds[tree][::2], speeds[chain][::2])
    return {"best_chain": chain._asdict(), "best_tree": tree._asdict(), **found}


def lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tables of a report, and a sentence for each temperature."""
    yield from table(
        ROWS,
        (
            (f["context"], f["nodes"], f"{f['chain_ms']:.3f}", f"{f['tree_ms']:.3f}", compared(f))
            for f in report["forwards"]
        ),
    )
    yield ""
    yield from table(
        DRAFTS,
        (
            (
                f"{each['temperature']:g}", Shape(d["depth"], d["nodes"]),
                f"{d['tokens_per_second']:.0f}", f"{d['acceptance_length'] or 1:.2f}",
            )
            for each in report["decoding"]
            for d in each["drafts"]
        ),
    )  # fmt: skip
    for each in report["decoding"]:
        chain, tree = (Shape(**each[f"best_{kind}"]) for kind in ("chain", "tree"))
        yield (
            f"\nT = {each['temperature']:g}: the best tree ({tree}) decodes at {compared(each)} of "
            f"the speed of the best chain ({chain})."
        )


def compared(figures: Mapping[str, Any]) -> str:
    """Return a ratio and its interval in figures."""
    return f"{figures['ratio']:.3f} {shown(figures['interval'], '.3f')}".rstrip()


def main(
    prompts: Prompts = PROMPTS,
    model: Annotated[str, typer.Option(help="A checkpoint's folder.")] = POCKET,
    drafter: Annotated[
        str, typer.Option(help="A smaller checkpoint's folder; the model's own unless given.")
    ] = "model",
    contexts: Annotated[str, typer.Option(help="Tokens before a forward.")] = "256,2048",
    nodes: Annotated[str, typer.Option(help="Draft nodes of a forward.")] = "1,4,16,64",
    lengths: Annotated[str, typer.Option(help="Draft lengths K of chains.")] = "2,3,4,6,8",
    trees: Annotated[
        str, typer.Option(help="Trees as NODES:DEPTH.")
    ] = "6:3,8:3,8:4,12:4,12:6,16:4,16:6",
    temperature: Annotated[str, typer.Option(help="Temperatures.")] = "0,0.7,1",
    num_prompts: Annotated[int, typer.Option(min=1, help="Of the prompts, the first ones.")] = 8,
    tokens: Tokens = 128,
    rounds: Annotated[int, typer.Option(min=2, help="Interleaved rounds.")] = 14,
    json_: JsonFile = None,
) -> None:
    """Measure trees beside chains."""
    before, counts = numbers(contexts, int, "--contexts"), numbers(nodes, int, "--nodes")
    temperatures = numbers(temperature, float, "--temperature")
    shapes = [
        *map(Shape, numbers(lengths, int, "--lengths")),
        *(Shape(depth, count) for count, depth in read_shapes(trees)),
    ]
    texts = read_prompts(prompts)[:num_prompts]
    with lengthened(find_folder(model), max(before) + max(counts) + 1) as folder:
        alone = LLM(folder, "none", max_num_seqs=1)
    rows = forwards(alone, before, counts, rounds)
    decoding = drafts(
        open_engines(model, drafter, shapes), shapes, texts, temperatures, tokens, rounds
    )
    report = {
        "machine": machine() | {"dtype": str(alone.engine.model.dtype).removeprefix("torch.")},
        "rounds": rounds, "tokens": tokens, "num_prompts": len(texts),
        "forwards": rows, "decoding": decoding,
    }  # fmt: skip
    write_json(report, json_)
    if json_ != "-":
        print("\n".join(lines(report)))
