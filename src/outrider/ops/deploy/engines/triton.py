"""Triton: a model repository for its vLLM backend."""

from __future__ import annotations

import json
import re

from ....errors import ConfigError, shown
from ..capabilities import DATA, Engine
from ..launch import Launch, Value
from ..spec import Spec
from .vllm import engine_arguments

REPOSITORY = "repository"
FOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


def launch(spec: Spec, engine: Engine) -> Launch:
    """Return ``tritonserver`` on a repository: ``config.pbtxt``, and ``model.json`` of vLLM."""
    arguments = {"model": spec.target.model, **engine_arguments(spec, engine)}
    arguments.pop("served_model_name", None)  # Triton names a model by its folder
    name = spec.service.model_name or spec.service.name
    if not FOLDER.fullmatch(name):
        raise ConfigError(
            f"Triton names a model by its folder, and service.model_name is {shown(name)}; give "
            "letters, digits, dots, hyphens and underscores."
        )
    folder = f"{REPOSITORY}/{name}"
    pbtxt = (DATA / "templates" / "config.pbtxt").read_text("utf-8")
    files = {
        f"{folder}/config.pbtxt": pbtxt,
        f"{folder}/1/model.json": json.dumps(arguments, indent=2, ensure_ascii=False) + "\n",
    }
    options: dict[str, Value] = {"--model-repository": REPOSITORY, "--http-port": spec.service.port}
    first = f"{folder}/config.pbtxt"
    return Launch(("tritonserver",), options, (first, files[first]), files=files)
