"""Our engine against other engines on this machine's CPU."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from outrider.bench.workload import CODE
from outrider.cli.bench import named_workload
from outrider.cli.common import LEAST_ROUNDS, Out, numbers, png, write_json
from outrider.errors import ConfigError, OutriderError
from outrider.native.choice import available

from .. import install
from ..common import Rounds
from . import known, pairs
from .markdown import markdown
from .measure import Bench
from .report import report as make_report
from .servers import Serving
from .settings import LENGTHS, Options

MODES = ("plain", "draft", "ngram", "auto")


def chosen(text: str, choices: tuple[str, ...], option: str) -> tuple[str, ...]:
    """Return the members of a comma list."""
    parts = tuple(dict.fromkeys(part for part in text.split(",") if part))
    wrong = [part for part in parts if part not in choices]
    if wrong or not parts:
        raise ConfigError(
            f"{option} has {(wrong or [text])[0]!r}; give one or more of {', '.join(choices)}."
        )
    return parts


def main(
    pair: Annotated[
        str,
        typer.Option(
            metavar="pocket|planted|gqa|1b|PATH|T.gguf,D.gguf",
            help="Pairs with commas: the bundled one; planted (12 layers x 768, random weights, a "
            "drafter that agrees on nine tokens of ten), gqa (10 layers x 1,024, four heads to a "
            "key head) or 1b (the shape of Llama-3.2-1B), made the same way on first use; a "
            "checkpoint's folder, its drafter in or beside it; or a GGUF file, its drafter's right "
            "behind it, which every engine reads as it is.",
        ),
    ] = "planted",
    peers: Annotated[
        str, typer.Option(help="Peers with commas; all that are installed unless given.")
    ] = "transformers,llama.cpp,ik_llama.cpp,mistral.rs,openvino,vllm",
    dtype: Annotated[
        str,
        typer.Option(
            help="With commas: float32, bfloat16, int8, int4, and int8-a8, int4-a8, where "
            "Outrider's activations have 8 bits too, as others' have anyway."
        ),
    ] = "float32,bfloat16",
    isa: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(install.ISA_OPTIONS),
            help="Keep every side within an instruction set of this CPU; llama.cpp's kernels for "
            "it are built by `python -m benchmarks install llama.cpp-ISA`.",
        ),
    ] = None,
    mode: Annotated[
        str,
        typer.Option(
            help="Modes with commas: plain, draft, ngram, and Outrider's auto of GGUF files."
        ),
    ] = "plain,draft,ngram,auto",
    lengths: Annotated[
        str,
        typer.Option("--num-speculative-tokens", help="Draft lengths that are tried, with commas."),
    ] = ",".join(map(str, LENGTHS)),
    concurrency: Annotated[
        str, typer.Option(help="Requests at a time, with commas; 1 runs the prompts one by one.")
    ] = "1",
    threads: Annotated[
        str, typer.Option(help="Thread counts that are tried, with commas; all cores, then 1.")
    ] = "",
    prefill: Annotated[
        int, typer.Option(help="Measure the prefill of a prompt of so many tokens too.")
    ] = 0,
    num_prompts: Annotated[
        int | None,
        typer.Option(help="How many prompts are run one by one; 2 of a planted pair, else 4."),
    ] = None,
    prompt_tokens: Annotated[
        int, typer.Option(help="Prompts are cut to so many tokens, but not the prefill's.")
    ] = pairs.PROMPT_TOKENS,
    max_tokens: Annotated[int, typer.Option(help="Output tokens of each prompt.")] = 128,
    batch_tokens: Annotated[
        int | None, typer.Option(help="Those of each of several requests, where they are others.")
    ] = None,
    temperature: Annotated[
        str, typer.Option(help="With commas; above 0 every engine draws its own noise.")
    ] = "0",
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE", help="Prompts as of outrider bench; code, and chat for clients."
        ),
    ] = None,
    clients: Annotated[
        str,
        typer.Option(
            help="Chats at a time over HTTP, with commas, against the servers of a GGUF file; "
            "their starts and memory are measured, too. '' for no servers."
        ),
    ] = "1,8,32",
    rounds: Rounds = LEAST_ROUNDS,
    out: Out = None,
    plot: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.png", callback=png, help="Draw the speeds, as PNG; needs outrider[plot]."
        ),
    ] = None,
) -> None:
    """Measure against other engines on this CPU; `make peers` installs them."""
    if plot:
        from .plot import draw
    if isa is not None:
        chosen(isa, tuple(install.ISA_OPTIONS), "--isa")
        if isa not in available():
            raise ConfigError(f"--isa is {isa!r}; this CPU runs {', '.join(available())}.")
    all_peers = known.peers(isa)
    others = tuple(name for name in all_peers if name != known.OWN)
    sides = [all_peers[name] for name in (known.OWN, *chosen(peers, others, "--peers"))]
    options = Options(
        dtypes=chosen(dtype, known.DTYPES, "--dtype"), rounds=rounds, max_tokens=max_tokens,
        prompt_tokens=prompt_tokens, batch_tokens=batch_tokens,
        prefill=prefill, isa=isa, modes=chosen(mode, MODES, "--mode"),
        lengths=tuple(sorted(numbers(lengths, int, "--num-speculative-tokens"))),
        concurrency=tuple(sorted(numbers(concurrency, int, "--concurrency"))),
        threads=numbers(threads, int, "--threads") if threads else (),
    )  # fmt: skip
    benches: list[Bench] = []

    def keep() -> None:  # after every load: a long run may end before its time
        if out != "-":
            write_json(make_report(benches), out)

    heats = numbers(temperature, float, "--temperature")
    chats = tuple(sorted(numbers(clients, int, "--clients"))) if clients else ()
    for name in pairs.split_pairs(pair):
        for heat in heats:
            found = pairs.find_pair(name, num_prompts, prompts or CODE)
            its = replace(options, temperature=heat)
            if found.is_file:
                its = replace(its, dtypes=(known.FILE,))
            if heat != heats[0]:  # reading a prompt is the same at any
                its = replace(its, prefill=0)
            benches.append(Bench(found, sides, its))
            benches[-1].run(keep)
            if found.is_file and chats and heat == heats[0]:
                Serving(benches[-1], chats, named_workload(prompts or "chat")).run()
                keep()
    report = make_report(benches)
    keep()
    runs = [run for entry in report["pairs"] for run in entry["runs"]]
    if not runs:
        raise OutriderError("nothing could be measured; the lines above say why.")
    if out == "-":
        write_json(report, out)
    else:
        print("\n".join(markdown(report)))
    if plot:
        draw(report, Path(plot))
    if any(run["peer"] == known.OWN and run["identical_to_plain"] is False for run in runs):
        raise OutriderError("Outrider's outputs with drafts differ from its plain ones.")
