"""``python -m benchmarks NAME``: one way to start every benchmark."""

import sys
from importlib import import_module

import typer

from outrider.base.extras import OF_TORCH
from outrider.cli.commands import BAD_USAGE, Commands

BENCHMARKS = {
    "advise": ("advise", "speedups that planning predicts, beside those that are measured"),
    "host": ("host", "time of a step outside C++, by drafter and batch size"),
    "contexts": ("contexts", "a token's forward behind long contexts, by dtype of the cache"),
    "hybrids": ("hybrids", "costs of layers with states, on shapes of published models"),
    "mixtures": ("mixtures", "costs of mixtures of experts, on shapes of published models"),
    "beside": ("beside", "a hybrid's GGUF file here and in llama.cpp, plain and with MTP"),
    "rules": ("rules", "acceptance of each rule, beside the bounds of theory"),
    "shift": ("shift", "a fine-tuned target, and its drafter before and after it is adapted"),
    "losses": ("losses", "drafters trained by different losses, beside each other"),
    "builds": ("builds", "two builds of Outrider beside each other"),
    "answers": ("answers", "two builds of Outrider asked the same, on every instruction set"),
    "portfolio": ("portfolio.command", "drafter auto against fixed choices"),
    "recording": ("portfolio.recording", "costs and acceptance of the portfolio's cells"),
    "serving": ("serving", "speed over HTTP beside the engine's own"),
    "start": ("start", "seconds to ready and memory of a server, beside other builds and servers"),
    "slower": ("slower", "what drafter auto costs where drafts do not pay, by processes"),
    "load": ("load", "what one core of bench serve carries, and agreement with other clients"),
    "soak": ("soak", "a server under load, a killed engine and hostile clients"),
    "drill": ("drill.command", "the guard on a real fleet with faults, through HAProxy"),
    "fuzz": ("fuzz.run", "random bodies against a real server"),
    "release": ("release", "the table of a release: auto under load, and exactness in every cell"),
    "peers": ("peers.command", "this engine against other engines on this machine's CPU"),
    "parity": ("parity", "greedy ids of the native step beside transformers' fp32 forward"),
    "gpu": ("gpu.command", "what is promised of a GPU, checked on one in under four minutes"),
    "plugged": ("plugged", "vLLM with Outrider's plugin beside vLLM without it"),
    "audits": ("audits", "outrider verify --endpoint against servers of other engines"),
    "lossless": ("lossless", "lossless-bench: engines with drafts against themselves without"),
    "cases": ("cases", "the recorded cases of outrider ops diagnose, from real servers"),
    "tables": ("peers.markdown", "the tables of a peers report"),
    "install": ("install", "other engines, and clients of others to try the server with"),
}
"""By name: the module below this package, whose ``main`` runs it, and what it measures."""
USAGE = """\
usage: python -m benchmarks NAME ...       from the repository's root
       python -m benchmarks NAME --help    for the options of one

"""


def application(name: str) -> typer.Typer:
    """Return the command line of one benchmark, whose errors are sentences and exit codes."""
    module, _ = BENCHMARKS[name]
    app = typer.Typer(cls=Commands, add_completion=False, pretty_exceptions_enable=False)
    app.callback()(lambda: None)  # a group, so that ``Commands`` catches the errors
    app.command(name)(import_module(f"benchmarks.{module}").main)
    return app


def main() -> None:
    """Run the benchmark that is named, or list all."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in BENCHMARKS:
        asked = name in ("-h", "--help")
        lines = [f"  {known:<9} {text}" for known, (_, text) in BENCHMARKS.items()]
        print(USAGE + "\n".join(lines), file=sys.stdout if asked else sys.stderr)
        sys.exit(0 if asked else BAD_USAGE)
    try:
        app = application(name)
    except ModuleNotFoundError as error:
        extra = "torch" if error.name in OF_TORCH else "benchmarks"
        sys.exit(f"error: {name} needs {error.name}; run: pip install 'outrider[{extra}]'")
    app(prog_name="python -m benchmarks")


if __name__ == "__main__":
    main()
