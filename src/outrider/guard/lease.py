"""What keeps two guards from acting at once."""

from __future__ import annotations

import fcntl
import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from ..errors import ConfigError, EndpointError
from .kubernetes import CONFLICT, MISSING, Cluster, reason
from .policy import Policy

FORMAT = "%Y-%m-%dT%H:%M:%S.%fZ"


class Lease(Protocol):
    """A right that one guard has at a time."""

    def hold(self, now: float) -> str | None:
        """Take or renew it; None where this guard has it, else a sentence on who does."""
        ...

    def release(self) -> None:
        """Give it back."""
        ...


def lease(policy: Policy) -> Lease:
    """Return the lease that a policy names."""
    if policy.lease.kind == "kubernetes":
        return KubernetesLease(policy)
    return FileLease(Path(policy.folder) / "lease")


class FileLease:
    """A lock of the kernel's on a file: it ends with its process, however that ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    def hold(self, now: float) -> str | None:
        """Take the lock unless this guard has it."""
        if self._file is not None:
            return None
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o640)
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be opened: {error.strerror}.") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            other = os.read(file, 64).decode("ascii", "replace").strip()
            os.close(file)
            return f"Another guard acts (process {other or 'unknown'}); this one only watches."
        os.ftruncate(file, 0)
        os.write(file, f"{os.getpid()}\n".encode())
        self._file = file
        return None

    def release(self) -> None:
        """Give the lock back."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class KubernetesLease:
    """A Lease of ``coordination.k8s.io``: whoever renewed it last has it until it runs out.

    Times are the holders' clocks, so these must agree better than the lease is long.
    """

    def __init__(self, policy: Policy) -> None:
        own = policy.lease
        self._cluster = Cluster(own.url, own.key_env)
        self._folder = f"/apis/coordination.k8s.io/v1/namespaces/{own.namespace}/leases"
        self._name, self._seconds = own.name, own.seconds
        self._me = f"{socket.gethostname()}_{os.getpid()}"

    def hold(self, now: float) -> str | None:
        """Take or renew the Lease; a conflict means that somebody else was faster."""
        try:
            return self._hold(now)
        except EndpointError as error:
            return f"The Lease cannot be renewed: {error}"

    def _hold(self, now: float) -> str | None:
        answer = self._cluster.ask(f"{self._folder}/{self._name}")
        if answer.status == MISSING:
            body = {
                "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
                "metadata": {"name": self._name}, "spec": self._spec(now, {}),
            }  # fmt: skip
            return self._taken(self._cluster.ask(self._folder, body))
        found = answer.json()
        if not answer.ok or not isinstance(found, dict):
            return f"The Lease {self._name} cannot be read ({reason(answer)})."
        spec = found.get("spec") or {}
        holder = spec.get("holderIdentity")
        if holder not in (None, "", self._me) and now < self._end(spec):
            return f"Another guard acts ({holder}); this one only watches."
        found["spec"] = self._spec(now, spec)
        return self._taken(self._cluster.ask(f"{self._folder}/{self._name}", found, method="PUT"))

    def _taken(self, answer: Any) -> str | None:
        if answer.ok:
            return None
        if answer.status == CONFLICT:
            return "Another guard took the Lease a moment ago; this one only watches."
        return f"The Lease {self._name} cannot be written ({reason(answer)})."

    def _end(self, spec: dict[str, Any]) -> float:
        try:
            renewed = datetime.strptime(spec["renewTime"], FORMAT).replace(tzinfo=UTC).timestamp()
            return renewed + float(spec.get("leaseDurationSeconds", self._seconds))
        except (KeyError, TypeError, ValueError):
            return 0.0

    def _spec(self, now: float, before: dict[str, Any]) -> dict[str, Any]:
        text = datetime.fromtimestamp(now, UTC).strftime(FORMAT)
        mine = before.get("holderIdentity") == self._me
        return {
            **before,
            "holderIdentity": self._me,
            "leaseDurationSeconds": max(1, round(self._seconds)),
            "renewTime": text,
            "acquireTime": before.get("acquireTime", text) if mine else text,
            "leaseTransitions": int(before.get("leaseTransitions") or 0) + (not mine),
        }

    def release(self) -> None:
        """Let it run out."""
