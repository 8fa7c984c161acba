"""Translates whole Kubernetes manifests of vLLM to their current form."""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ....base.outside.documents import parse_yaml
from ....errors import ConfigError, shown
from ..capabilities import EngineVersion, find
from ..engines import DRAIN_SECONDS
from . import vllm
from .rules import Changes, Translated
from .shell import commands, in_manifest, known, number, plain, quoted
from .splice import splice

Table = dict[str, Any]
WORKLOADS = ("Deployment", "StatefulSet")
GPU = "nvidia.com/gpu"
DELAY = "initialDelaySeconds"
DRAIN = "--shutdown-timeout"
PRE_STOP_SECONDS = 15
SHORTEST_GRACE = 75
ADDED_TO_CONTAINERS: Table = {
    "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(PRE_STOP_SECONDS)]}}},
    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
}
SHELLS = ("sh", "bash", "/bin/sh", "/bin/bash")
FILLED = ("metadata", "spec", "template", "selector", "matchLabels", "containers", "resources",
          "limits", "livenessProbe", "readinessProbe", "httpGet")  # fmt: skip
"""Keys of a workload that must have values below them."""
ONE_LINE = re.compile(r"^\s*apiVersion:\s*[^\s{]+\s+\w+:\s")
PASTE = "paste the manifest with its own spaces and lines."
USUAL_VALUES = 10_000
"""Number of values that any manifest may have, however short its text is."""


def translate(text: str) -> Translated:
    """Return the current manifests, with every change explained; unknown kinds stay."""
    try:
        old = parse_yaml(text, "The manifest")
    except ConfigError as error:
        likely = re.search("expected|mapping values|block|indent|simple key", str(error))
        hint = " Look at the indentation there, and in the line before." if likely else ""
        raise ConfigError(_lost(text) or f"{error}{hint}") from None
    if _size(old) > max(USUAL_VALUES, len(text)):
        raise ConfigError("The manifest's aliases expand to far too much; write out their values.")
    documents, changes, served = deepcopy(old), Changes(), 0
    for each in (one for document in documents for one in _objects(document)):
        if each.get("kind") in WORKLOADS:
            served += _workload(each, find("vllm"), changes)
        elif each.get("kind") == "Service":
            _service(each, changes)
    if not served:
        none = "No container of these manifests runs vLLM; give its Deployment."
        raise ConfigError(_lost(text) or none)
    return Translated("manifests.yaml", splice(text, old, documents), changes)


def _lost(text: str) -> str | None:
    """Return an error text if a manifest lost its indentation or line breaks, else None."""
    if "{{" in text:
        return "The manifest is a template of a chart; give the output of helm template."
    lines = [line for line in text.splitlines() if line.strip() and line.lstrip()[0] != "#"]
    for at, line in enumerate(text.splitlines(), 1):
        if ONE_LINE.search(line):
            return f"The manifest's line breaks are lost: line {at} has several keys; " + PASTE
    for line, after in pairwise([*lines, ""]):
        key = line.strip().removeprefix("- ").rstrip(": ")
        if line.rstrip().endswith(":") and key in FILLED and not _below(line, after):
            at = text.splitlines().index(line) + 1
            return (
                f"The manifest's indentation is lost: line {at}, {shown(key)}, has nothing below "
                "it; " + PASTE
            )
    return None


def _below(line: str, after: str) -> bool:
    """Return whether the line after a key belongs to it: indented further, or a list item."""
    begin, next_ = (len(each) - len(each.lstrip()) for each in (line, after))
    listed = after.lstrip().startswith("-") and not line.lstrip().startswith("-")
    return bool(after) and (next_ > begin or (next_ == begin and listed))


def _size(value: Any) -> int:
    """Return the number of values in a value, itself included."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(_size, inner))


def _objects(document: Any) -> Iterator[Table]:
    """Yield a document, or the objects in a kubectl List."""
    if isinstance(document, dict) and document.get("kind") == "List":
        for each in _tables(document, "items"):
            yield from _objects(each)
    elif isinstance(document, dict):
        yield document


def _table(owner: Table, *names: str) -> Table:
    """Return the table at a path in ``owner``; a new empty table if there is none."""
    for name in names:
        value = owner.get(name)
        owner = value if isinstance(value, dict) else {}
    return owner


def _tables(owner: Table, name: str) -> list[Table]:
    """Return the list of tables of that name in ``owner``; empty if there is none."""
    value = owner.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise ConfigError(f"{name} of the manifest is {shown(value)}; write a list of tables.")
    return value


def _workload(document: Table, engine: EngineVersion, changes: Changes) -> int:
    """Bring a Deployment up to date in place; return how many containers run vLLM."""
    pod = _table(document, "spec", "template", "spec")
    drains = []
    for container in _tables(pod, "containers"):
        if "vllm" in str(container.get("image", "")):
            drains.append(_container(container, engine, changes))
            _shared_memory(pod, container, changes)
    if not drains:
        return 0
    grace = pod.get("terminationGracePeriodSeconds")
    needed = max(SHORTEST_GRACE, 2 * PRE_STOP_SECONDS + max(drains))
    if not isinstance(grace, int) or grace < needed:
        pod["terminationGracePeriodSeconds"] = needed
        changes.note("grace", old=grace or "(30)", new=needed)
    for name in ("enableServiceLinks", "automountServiceAccountToken"):
        if pod.get(name) is not False:
            pod[name] = False
            changes.note(name)
    return len(drains)


def _container(container: Table, engine: EngineVersion, changes: Changes) -> int:
    """Bring a container up to date in place; return the seconds in which streams may end."""
    _image(container, engine, changes)
    shell, words = _words(container)
    launch, more = vllm.serve(words)
    changes += more
    options = dict(launch.options)
    if DRAIN not in options:
        options[DRAIN] = DRAIN_SECONDS
        changes.note("drain", seconds=DRAIN_SECONDS)
    arguments = replace(launch, options=options).arguments()
    if shell and not all(map(known, arguments)):  # a shell expands the variables
        container["command"] = [*shell, f"exec {' '.join(map(quoted, arguments))}"]
    else:
        container["command"] = [plain(word) for word in arguments]
    container.pop("args", None)
    _probes(container, engine, changes)
    sizes = ("--tensor-parallel-size", "--pipeline-parallel-size")
    tensor, stages = (number(options.get(size, 1), size) for size in sizes)
    _resources(container, tensor * stages if tensor and stages else None, changes)
    _secrets(container, changes)
    for name, value in ADDED_TO_CONTAINERS.items():
        if name not in container:
            container[name] = deepcopy(value)
            changes.note(name, seconds=PRE_STOP_SECONDS)
    return number(options[DRAIN], DRAIN) or DRAIN_SECONDS


def _image(container: Table, engine: EngineVersion, changes: Changes) -> None:
    old = str(container["image"])
    if old == engine.image or not old.startswith("vllm/vllm-openai"):
        return
    if known(in_manifest(old)):
        container["image"] = engine.image
        changes.note("image", old=old, new=engine.image)
    else:
        changes.note("image_of_variable", old=old, new=engine.image)


def _words(container: Table) -> tuple[list[str], list[str]]:
    """Return the shell that runs the container's command, if one does, and the command's words."""
    words = []
    for part in ("command", "args"):
        value = container.get(part) or []
        if not isinstance(value, list):
            raise ConfigError(f"{part} of a container is {shown(value)}; write a list of words.")
        words += [str(word) for word in value]
    if words and words[0] in SHELLS:
        flags = [word for word in words[1:] if word.startswith("-")]
        script = " ".join(word for word in words[1:] if not word.startswith("-"))
        lines = [line for line in commands(script) if vllm.is_vllm(line.words)]
        if len(lines) != 1 or lines[0].variables:
            raise ConfigError(
                "The container's shell does not run one command of vLLM; write it so, with "
                "variables in env."
            )
        return [words[0], *flags], lines[0].words
    words = [in_manifest(word) for word in words]
    if words and words[0].startswith("-"):
        return [], ["vllm", "serve", *words]  # the image's own entry point
    return [], words


def _probes(container: Table, engine: EngineVersion, changes: Changes) -> None:
    """Replace fixed delays by a startup probe; let the readiness probe ask for a model."""
    ports = [each.get("name") or each.get("containerPort") for each in _tables(container, "ports")]
    port = ports[0] if ports else 8000
    for name, path in (("livenessProbe", engine.alive), ("readinessProbe", engine.ready)):
        old = _table(container, name)
        usual = {"httpGet": {"path": path, "port": port}, "periodSeconds": 10, "timeoutSeconds": 5}
        probe = {key: value for key, value in (old or usual).items() if key != DELAY}
        if asked := _table(probe, "httpGet"):
            probe["httpGet"] = {**asked, "path": path}
        container[name] = probe
        if DELAY in old:
            changes.note("delay", name=name, seconds=old[DELAY])
        was = _table(old, "httpGet").get("path", path if old else "(none)")
        if was != path:
            changes.note(name, old=was, new=path)
    if "startupProbe" not in container:
        often = {"periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 180}
        container["startupProbe"] = {**deepcopy(container["livenessProbe"]), **often}
        changes.note("startupProbe", path=engine.alive)


def _resources(container: Table, needed: int | None, changes: Changes) -> None:
    """Keep the GPUs; note it if the command ``needed`` another number (None: a variable)."""
    resources = _table(container, "resources")
    limits = _table(resources, "limits")
    gpus = limits.get(GPU)
    if gpus is None:
        container["resources"] = {**resources, "limits": limits | {GPU: needed or 1}}
        changes.note("gpus" if needed else "gpus_of_variable", needed=needed)
    elif needed is not None and str(gpus) != str(needed):
        changes.note("other_gpus", gpus=gpus, needed=needed)


def _secrets(container: Table, changes: Changes) -> None:
    """Move tokens, keys and passwords in clear text from the manifest to secrets."""
    for each in _tables(container, "env"):
        name = str(each.get("name", ""))
        secret_name = name.endswith(("TOKEN", "KEY", "PASSWORD"))
        if not secret_name or "value" not in each or str(each["value"]).startswith("$("):
            continue
        hub = name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
        secret = "hub-token" if hub else name.lower().replace("_", "-")
        del each["value"]
        each["valueFrom"] = {"secretKeyRef": {"name": secret, "key": "token"}}
        why = f"a manifest is no place for secrets: make the secret {secret}, revoke this one"
        changes.add(f"env {name} in clear", f"secretKeyRef {secret}", why)


def _shared_memory(pod: Table, container: Table, changes: Changes) -> None:
    """Mount memory at /dev/shm, through which the processes of a replica share tensors."""
    mounts, volumes = _tables(container, "volumeMounts"), _tables(pod, "volumes")
    if any(mount.get("mountPath") == "/dev/shm" for mount in mounts):
        return
    container["volumeMounts"] = [*mounts, {"name": "shm", "mountPath": "/dev/shm"}]
    if not any(volume.get("name") == "shm" for volume in volumes):
        volume = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}
        pod["volumes"] = [*volumes, volume]
    changes.note("shared_memory")


def _service(document: Table, changes: Changes) -> None:
    spec = _table(document, "spec")
    old = spec.get("type", "ClusterIP")
    if old not in ("LoadBalancer", "NodePort"):
        return
    spec["type"] = "ClusterIP"
    for port in _tables(spec, "ports"):
        port.pop("nodePort", None)
    for name in ("externalTrafficPolicy", "loadBalancerIP", "loadBalancerSourceRanges"):
        spec.pop(name, None)
    changes.note("service", old=old)
