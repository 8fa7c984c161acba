"""The manifests below ``deploy/kubernetes`` as objects, and the schemas that they must follow."""

from __future__ import annotations

import json
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.support import REPOSITORY
from tests.support.record_schemas import FILE

DEPLOY = REPOSITORY / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
STEPS = (0, 5, 25, 50, 100)
FOLDERS = (
    "overlays/dev", "overlays/staging", "overlays/production", "models", "guard",
    *(f"route/{step}" for step in STEPS),
)  # fmt: skip
needs_kubectl = pytest.mark.skipif(
    not shutil.which("kubectl"), reason="needs kubectl, which renders kustomizations"
)
Object = dict[str, Any]


@cache
def built(folder: Path) -> str:
    """What ``kubectl kustomize`` makes of a folder."""
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects(folder: Path | str) -> list[Object]:
    """The objects of a folder; a relative one is below ``deploy/kubernetes``."""
    return list(yaml.safe_load_all(built(KUBERNETES / folder)))


def of_kind(found: list[Object], kind: str) -> list[Object]:
    """The objects of a kind."""
    return [each for each in found if each["kind"] == kind]


def one(found: list[Object], kind: str, name: str) -> Object:
    """The object of a kind and a name; there is just one."""
    (match,) = (each for each in of_kind(found, kind) if each["metadata"]["name"] == name)
    return match


def container(workload: Object) -> Object:
    """The only container of a Deployment or a Job."""
    (found,) = workload["spec"]["template"]["spec"]["containers"]
    return found


@cache
def recorded() -> dict[str, Any]:
    """The schemas by kind, and their common definitions."""
    found: dict[str, Any] = json.loads(FILE.read_text("utf-8"))
    return found


def problems(thing: Object) -> list[str]:
    """What the recorded schema of its kind has against an object."""
    kind = f"{thing.get('apiVersion')} {thing.get('kind')}"
    if kind not in recorded()["kinds"]:
        return [f"no schema of {kind} is recorded"]
    schema = {**recorded()["kinds"][kind], "definitions": recorded()["definitions"]}
    errors = jsonschema.Draft7Validator(schema).iter_errors(thing)
    return [f"{kind} {error.json_path}: {error.message[:300]}" for error in errors]
