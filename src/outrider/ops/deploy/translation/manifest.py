"""Whole Kubernetes manifests of vLLM, as they would be written today."""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ....base.outside.documents import parse_yaml
from ....errors import ConfigError, shown
from ..capabilities import Engine, find
from ..engines.vllm import DRAIN_SECONDS
from ..launch import Launch
from ..yamls import dump
from . import vllm
from .rules import Change, Translated
from .variables import in_manifest, known, plain, quoted
from .words import commands, number

WORKLOADS = ("Deployment", "StatefulSet")
GPU = "nvidia.com/gpu"
DELAY = "initialDelaySeconds"
DRAIN = "--shutdown-timeout"
PRE_STOP = 15
SHORTEST_GRACE = 75
SHELLS = ("sh", "bash", "/bin/sh", "/bin/bash")
FILLED = ("metadata", "spec", "template", "selector", "matchLabels", "containers", "resources",
          "limits", "livenessProbe", "readinessProbe", "httpGet")  # fmt: skip
"""Keys of a workload that need values below them."""
ONE_LINE = re.compile(r"^\s*apiVersion:\s*[^\s{]+\s+\w+:\s")
PASTE = "paste the manifest with its own spaces and lines."
SMALL = 10_000
"""Values that any manifest may have, however short its text is."""


def translate(text: str) -> Translated:
    """Return the manifests of today, with every deviation explained; unknown kinds stay.

    Raises:
        ConfigError: it is no YAML, or no container runs vLLM.
    """
    try:
        documents = [each for each in parse_yaml(text, "The manifest") if each is not None]
    except ConfigError as error:
        raise ConfigError(_lost(text) or f"{error}{_hint(str(error))}") from None
    if _size(documents) > max(SMALL, len(text)):
        raise ConfigError("The manifest's aliases expand to far too much; write out their values.")
    engine = find("vllm")
    changes: list[Change] = []
    served = 0
    for each in (one for document in documents for one in _objects(document)):
        if each.get("kind") in WORKLOADS:
            served += _workload(each, engine, changes)
        elif each.get("kind") == "Service":
            _service(each, changes)
    if not served:
        none = "No container of these manifests runs vLLM; give its Deployment."
        raise ConfigError(_lost(text) or none)
    return Translated("manifests.yaml", "---\n".join(dump(each) for each in documents), changes)


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


def _hint(said: str) -> str:
    """Return a hint if a YAML parser's error is likely to come from indentation, else ""."""
    likely = re.search("expected|mapping values|block|indent|simple key", said)
    return " Look at the indentation there, and in the line before." if likely else ""


def _size(value: Any) -> int:
    """Return how many values a value holds, itself included."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(_size, inner))


def _below(line: str, after: str) -> bool:
    """Return whether the line after a key belongs to it: indented further, or a list item."""
    begin, next_ = (len(each) - len(each.lstrip()) for each in (line, after))
    listed = after.lstrip().startswith("-") and not line.lstrip().startswith("-")
    return bool(after) and (next_ > begin or (next_ == begin and listed))


def _objects(document: Any) -> Iterator[dict[str, Any]]:
    """Yield a document, or what a List of kubectl's holds."""
    if isinstance(document, dict) and document.get("kind") == "List":
        for each in _tables(document, "items"):
            yield from _objects(each)
    elif isinstance(document, dict):
        yield document


def _workload(document: dict[str, Any], engine: Engine, changes: list[Change]) -> int:
    """Bring a Deployment up to date in place; return how many containers run vLLM."""
    pod = _table(_table(_table(document, "spec"), "template"), "spec")
    drains = []
    for container in _tables(pod, "containers"):
        if _runs(container):
            drains.append(_container(container, engine, changes))
            _shared_memory(pod, container, changes)
    if drains:
        _grace(pod, max(drains), changes)
        _links(pod, changes)
        _account(pod, changes)
    return len(drains)


def _runs(container: dict[str, Any]) -> bool:
    """Return whether a container runs vLLM, by its image's name."""
    return "vllm" in str(container.get("image", ""))


def _table(owner: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the table of that name in ``owner``; an empty one of its own where there is none."""
    value = owner.get(name)
    return value if isinstance(value, dict) else {}


def _tables(owner: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the list of tables of that name in ``owner``, empty where there is none.

    Raises:
        ConfigError: it is something else.
    """
    value = owner.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise ConfigError(f"{name} of the manifest is {shown(value)}; write a list of tables.")
    return value


def _container(container: dict[str, Any], engine: Engine, changes: list[Change]) -> int:
    """Bring a container up to date in place; return the seconds that streams get to end."""
    _image(container, engine, changes)
    shell, words = _words(container)
    launch, found = vllm.serve(words)
    changes += found
    launch = _drain(launch, changes)
    arguments = launch.arguments()
    if shell and not all(map(known, arguments)):  # a shell expands the variables
        container["command"] = [*shell, f"exec {' '.join(map(quoted, arguments))}"]
    else:
        container["command"] = [plain(word) for word in arguments]
    container.pop("args", None)
    _probes(container, engine, changes)
    sizes = ("--tensor-parallel-size", "--pipeline-parallel-size")
    tensor, stages = (number(launch.options.get(size, 1), size) for size in sizes)
    _resources(container, tensor * stages if tensor and stages else None, changes)
    _secrets(container, changes)
    if "lifecycle" not in container:
        container["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", str(PRE_STOP)]}}}
        why = "the Service forgets the pod before it stops taking requests"
        changes.append(Change("(no preStop)", f"sleep {PRE_STOP}", why))
    if "securityContext" not in container:
        drop = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        container["securityContext"] = drop
        changes.append(Change("(no securityContext)", "no privileges", "the engine needs none"))
    drain = launch.options[DRAIN]
    return number(drain, DRAIN) or DRAIN_SECONDS


def _image(container: dict[str, Any], engine: Engine, changes: list[Change]) -> None:
    old = str(container["image"])
    if old == engine.image or not old.startswith("vllm/vllm-openai"):
        return
    if known(in_manifest(old)):
        container["image"] = engine.image
        why = "options below are of this version; pin it, and test before you switch"
        changes.append(Change(f"image {old}", engine.image, why))
    else:
        why = f"options below are of {engine.image}; set its variable so, and test"
        changes.append(Change(f"image {old}", "unchanged", why))


def _drain(launch: Launch, changes: list[Change]) -> Launch:
    """Return the launch with time for streams to end."""
    if DRAIN in launch.options:
        return launch
    why = "SIGTERM aborts running streams unless they get time to end"
    changes.append(Change(f"(no {DRAIN})", f"{DRAIN} {DRAIN_SECONDS}", why))
    return replace(launch, options={**launch.options, DRAIN: DRAIN_SECONDS})


def _words(container: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the shell that runs the container's command, if one does, and the command's words.

    Raises:
        ConfigError: they cannot be read, or several commands run.
    """
    words = []
    for part in ("command", "args"):
        value = container.get(part) or []
        if not isinstance(value, list):
            raise ConfigError(f"{part} of a container is {shown(value)}; write a list of words.")
        words += [str(word) for word in value]
    if words and words[0] in SHELLS:
        script = [w for w in words[1:] if not w.startswith("-")]
        found = [line for line in commands(" ".join(script)) if vllm.is_vllm(line.words)]
        if len(found) != 1 or found[0].variables:
            raise ConfigError(
                "The container's shell does not run one command of vLLM; write it so, with "
                "variables in env."
            )
        return [*words[:1], *(w for w in words[1:] if w.startswith("-"))], found[0].words
    words = [in_manifest(word) for word in words]
    if words and words[0].startswith("-"):
        return [], ["vllm", "serve", *words]  # the image's own entry point
    return [], words


def _probes(container: dict[str, Any], engine: Engine, changes: list[Change]) -> None:
    """Let a startup probe do what fixed delays did; readiness asks for a model."""
    named = [each.get("name") or each.get("containerPort") for each in _tables(container, "ports")]
    port = named[0] if named else 8000
    for name, path in (("livenessProbe", engine.alive), ("readinessProbe", engine.ready)):
        old = _table(container, name)
        usual = {"httpGet": {"path": path, "port": port}, "periodSeconds": 10, "timeoutSeconds": 5}
        probe = {key: value for key, value in (old or usual).items() if key != DELAY}
        asked = _table(probe, "httpGet")
        if asked:
            probe["httpGet"] = {**asked, "path": path}
        container[name] = probe
        if DELAY in old:
            why = "no fixed delay fits all models: too short kills them while they load"
            changes.append(Change(f"{name}.{DELAY} {old[DELAY]}", "startupProbe", why))
        was = _table(old, "httpGet").get("path", "(none)" if not old else path)
        if was != path:
            why = (
                "ready means that a model is served, not that a process lives"
                if name == "readinessProbe"
                else "a process that hangs is started again"
            )
            changes.append(Change(f"{name} {was}", path, why))
    if "startupProbe" not in container:
        asked = {"periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 180}
        container["startupProbe"] = {**deepcopy(container["livenessProbe"]), **asked}
        why = "liveness waits until the weights are read, for half an hour at most"
        changes.append(Change("(no startupProbe)", engine.alive, why))


def _resources(container: dict[str, Any], needed: int | None, changes: list[Change]) -> None:
    """Keep the GPUs, and note it if the command splits the model over another number of them.

    ``needed`` is None if a variable holds the number.
    """
    resources = _table(container, "resources")
    gpus = _table(resources, "limits").get(GPU)
    if gpus is None:
        limits = _table(resources, "limits") | {GPU: needed or 1}
        container["resources"] = {**resources, "limits": limits}
        why = "without a limit the pod gets no GPU"
        why += "" if needed else "; make it the number that the command's variables say"
        changes.append(Change(f"(no {GPU})", str(needed or 1), why))
    elif needed is not None and str(gpus) != str(needed):
        why = f"the command splits the model over {needed}; make both equal"
        changes.append(Change(f"{GPU} {gpus}", f"{gpus}, unchanged", why))


def _secrets(container: dict[str, Any], changes: list[Change]) -> None:
    """Take tokens from a secret that stand in the manifest."""
    for each in _tables(container, "env"):
        name = str(each.get("name", ""))
        if name.endswith(("TOKEN", "KEY", "PASSWORD")) and "value" in each:
            if str(each["value"]).startswith("$("):
                continue
            hub = name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
            secret = "hub-token" if hub else name.lower().replace("_", "-")
            del each["value"]
            each["valueFrom"] = {"secretKeyRef": {"name": secret, "key": "token"}}
            why = f"a manifest is no place for secrets: make the secret {secret}, revoke this one"
            changes.append(Change(f"env {name} in clear", f"secretKeyRef {secret}", why))


def _shared_memory(pod: dict[str, Any], container: dict[str, Any], changes: list[Change]) -> None:
    """Mount memory at /dev/shm, where the processes of one replica share tensors."""
    mounts = _tables(container, "volumeMounts")
    if any(mount.get("mountPath") == "/dev/shm" for mount in mounts):
        return
    container["volumeMounts"] = [*mounts, {"name": "shm", "mountPath": "/dev/shm"}]
    volumes = _tables(pod, "volumes")
    if not any(volume.get("name") == "shm" for volume in volumes):
        volume = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}
        pod["volumes"] = [*volumes, volume]
    why = "processes of one replica share tensors there; containers have 64 MiB of it"
    changes.append(Change("(no /dev/shm)", "8Gi in memory", why))


def _grace(pod: dict[str, Any], drain: int, changes: list[Change]) -> None:
    old = pod.get("terminationGracePeriodSeconds")
    needed = max(SHORTEST_GRACE, 2 * PRE_STOP + drain)
    if not isinstance(old, int) or old < needed:
        pod["terminationGracePeriodSeconds"] = needed
        why = "above preStop and the time that streams get to end"
        changes.append(Change(f"terminationGracePeriodSeconds {old or '(30)'}", str(needed), why))


def _links(pod: dict[str, Any], changes: list[Change]) -> None:
    if pod.get("enableServiceLinks") is not False:
        pod["enableServiceLinks"] = False
        why = "a Service named vllm would set VLLM_PORT, which vLLM reads as its own"
        changes.append(Change("enableServiceLinks (true)", "false", why))


def _account(pod: dict[str, Any], changes: list[Change]) -> None:
    if pod.get("automountServiceAccountToken") is not False:
        pod["automountServiceAccountToken"] = False
        why = "the engine asks nothing of the cluster"
        changes.append(Change("automountServiceAccountToken (true)", "false", why))


def _service(document: dict[str, Any], changes: list[Change]) -> None:
    spec = _table(document, "spec")
    old = spec.get("type", "ClusterIP")
    if old in ("LoadBalancer", "NodePort"):
        spec["type"] = "ClusterIP"
        for port in _tables(spec, "ports"):
            port.pop("nodePort", None)
        for name in ("externalTrafficPolicy", "loadBalancerIP", "loadBalancerSourceRanges"):
            spec.pop(name, None)
        why = (
            "it opened an engine without keys to the network, and one Service cannot weigh traffic "
            "between a speculative and a plain Deployment; put an HTTPRoute or Ingress in front"
        )
        changes.append(Change(f"Service type {old}", "ClusterIP", why))
