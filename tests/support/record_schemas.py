"""Record the schemas of the Kubernetes objects that ``deploy`` has, as small as they can be.

    python -m tests.support.record_schemas FOLDER CRD.yaml...

FOLDER is ``kubernetes-json-schema/vX.Y.0-local-strict`` of the package kubernetes-validate, a CRD
the file of its project. Descriptions go, and a field that a schema does not name is an error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.support import DATA

FILE = DATA / "schemas" / "kubernetes.json"
CORE = (
    "Deployment-apps-v1", "Service-v1", "Namespace-v1", "ConfigMap-v1", "Secret-v1",
    "PersistentVolumeClaim-v1", "ServiceAccount-v1", "Job-batch-v1",
    "PodDisruptionBudget-policy-v1", "NetworkPolicy-networking-v1", "PriorityClass-scheduling-v1",
    "HorizontalPodAutoscaler-autoscaling-v2", "Role-rbac-v1", "RoleBinding-rbac-v1",
)  # fmt: skip
DROPPED = {"description", "title", "example", "default"}
OPEN = "x-kubernetes-preserve-unknown-fields"


def references(schema: Any) -> Iterator[str]:
    """Yield the names of the definitions that a schema refers to."""
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"].rpartition("/")[2]
        for each in schema.values():
            yield from references(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from references(each)


def small(schema: Any, named: bool = False) -> Any:
    """Return a schema without prose and annotations; ``named`` is a table of properties."""
    if isinstance(schema, list):
        return [small(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {
        key: small(value, key in ("properties", "definitions") and not named)
        for key, value in schema.items()
        if named or (key not in DROPPED and (key == "$ref" or not key.startswith(("x-", "$"))))
    }
    if isinstance(kept.get("$ref"), str):
        kept["$ref"] = "#/definitions/" + kept["$ref"].rpartition("/")[2]
    if not named and "properties" in kept and not schema.get(OPEN):
        kept.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        kept["type"] = ["integer", "string"]
    return kept


def core(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the kinds of Kubernetes itself, and the definitions that they need."""
    known = json.loads((folder / "_definitions.json").read_text("utf-8"))["$defs"]
    kinds, needed = {}, {}
    for name in CORE:
        schema = json.loads((folder / f"{name.lower()}.json").read_text("utf-8"))
        (group,) = schema["x-kubernetes-group-version-kind"]
        version = "/".join(filter(None, (group["group"], group["version"])))
        kinds[f"{version} {group['kind']}"] = small(schema)
        waiting = [*references(schema)]
        while waiting:
            each = waiting.pop()
            if each not in needed:
                needed[each] = small(known[each])
                waiting += references(known[each])
    return kinds, needed


def custom(file: Path) -> dict[str, Any]:
    """Return the kinds of a custom resource, one for each version."""
    spec = yaml.safe_load(file.read_text("utf-8"))["spec"]
    found = {}
    for version in spec["versions"]:
        schema = small(version["schema"]["openAPIV3Schema"])
        # It is Kubernetes that knows these.
        schema["properties"] |= {"metadata": {"$ref": "#/definitions/" + METADATA}}
        schema["required"] = sorted({*schema.get("required", ()), "apiVersion", "kind", "metadata"})
        found[f"{spec['group']}/{version['name']} {spec['names']['kind']}"] = schema
    return found


METADATA = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"


def lines(values: Mapping[str, Any]) -> str:
    """Return an object with a line for each of its values."""
    each = (
        f"{json.dumps(key)}: {json.dumps(values[key], sort_keys=True)}" for key in sorted(values)
    )
    return "{\n" + ",\n".join(each) + "\n}"


def main() -> None:
    """Write the file."""
    folder, *crds = map(Path, sys.argv[1:])
    kinds, definitions = core(folder)
    for crd in crds:
        kinds |= custom(crd)
    source = json.dumps([folder.name, *(crd.name for crd in crds)])
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(
        f'{{"source": {source},\n"definitions": {lines(definitions)},\n"kinds": {lines(kinds)}}}\n',
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
