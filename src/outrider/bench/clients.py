"""Clients of others, to try the server with: ``python -m outrider.bench.clients`` installs them.

An environment each, beside the peers' (see ``peers.setup``), whose vLLM has one of the clients.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from .peers.known import FOLDER
from .peers.setup import TORCH, VLLM, Environment, install, install_named

GUIDELLM = Environment("guidellm", (TORCH, "guidellm==0.8.1"))
SCHEMATHESIS = Environment("schemathesis", ("schemathesis==4.32.5",))
CLIENTS = {environment.name: environment for environment in (VLLM, GUIDELLM, SCHEMATHESIS)}


def command(environment: Environment) -> list[str | Path]:
    """What runs a client; its arguments follow."""
    if environment is VLLM:
        return [VLLM.python, "-P", FOLDER / "runners" / "vllm_command.py"]
    return [environment.python.with_name(environment.name)]


def main() -> None:
    """Install clients."""
    installers = {name: partial(install, environment) for name, environment in CLIENTS.items()}
    install_named("python -m outrider.bench.clients", "clients", installers)


if __name__ == "__main__":
    main()
