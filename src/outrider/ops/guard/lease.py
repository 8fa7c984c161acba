"""Keeps two guards from acting at once."""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ...base.fields import is_number
from ...base.limits import LARGEST_INT
from ...base.outside.text import printable
from ...errors import EndpointError
from .kubernetes import CONFLICT, MISSING, Cluster, reason
from .policy import Policy
from .store import StoreError

TIME_FORMAT = "%Y-%m-%dT%H:%M:%S.%fZ"
MOST_LEASE_SECONDS = 86400.0


class FileLease:
    """A kernel lock on a file, which ends with its process, however that ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    def hold(self, now: float) -> str | None:
        """Take the lock on the file that is now at the path; see ``GuardLease``."""
        if self._is_there():
            return None
        self.release()
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o640)
        except OSError as error:
            raise StoreError(f"{self._path} cannot be opened: {error.strerror}.") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            other = printable(os.pread(file, 64, 0).decode("ascii", "replace"))
            os.close(file)
            return f"Another guard acts (process {other or 'unknown'}); this one only watches."
        self._file = file
        with suppress(OSError):  # on a full disk the lock holds without the process id
            os.ftruncate(file, 0)
            os.write(file, f"{os.getpid()}\n".encode())
        return None

    def _is_there(self) -> bool:
        """Return whether this guard has a lock on the file that is now at the path."""
        with suppress(OSError):
            if self._file is not None:
                return os.path.samestat(os.fstat(self._file), os.stat(self._path))
        return False

    def release(self) -> None:
        """Release the lock."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class KubernetesLease:
    """A Lease of ``coordination.k8s.io``: the last guard that renewed it holds it until it expires.

    It expires when this guard has seen no renewal for its duration, as in client-go's leader
    election. Clocks of different machines are not compared.
    """

    def __init__(self, policy: Policy) -> None:
        own = policy.lease
        self._cluster = Cluster(own.url, own.key_env)
        self._folder = f"/apis/coordination.k8s.io/v1/namespaces/{own.namespace}/leases"
        self._name, self._seconds = own.name, own.seconds
        self._me = f"{socket.gethostname()}_{os.getpid()}"
        self._seen: object = None
        self._since = 0.0

    def hold(self, now: float) -> str | None:
        """Take or renew the Lease at ``now``, in seconds of a monotonic clock."""
        try:
            return self._hold(now)
        except EndpointError as error:
            return f"The Lease cannot be renewed: {error}"

    def _hold(self, now: float) -> str | None:
        answer = self._cluster.ask(f"{self._folder}/{self._name}")
        if answer.status == MISSING:
            body = {
                "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
                "metadata": {"name": self._name}, "spec": self._spec({}),
            }  # fmt: skip
            return self._taken(self._cluster.ask(self._folder, body))
        there = answer.json()
        if not answer.ok or not isinstance(there, dict):
            return f"The Lease {self._name} cannot be read ({reason(answer)})."
        spec = there["spec"] if isinstance(there.get("spec"), dict) else {}
        holder = spec.get("holderIdentity")
        if holder not in (None, "", self._me) and not self._ran_out(spec, now):
            return f"Another guard acts ({printable(holder, 100)}); this one only watches."
        there["spec"] = self._spec(spec)
        return self._taken(self._cluster.ask(f"{self._folder}/{self._name}", there, method="PUT"))

    def _taken(self, answer: Any) -> str | None:
        if answer.ok:
            return None
        if answer.status == CONFLICT:
            return "Another guard took the Lease a moment ago; this one only watches."
        return f"The Lease {self._name} cannot be written ({reason(answer)})."

    def _ran_out(self, spec: dict[str, Any], now: float) -> bool:
        """Return whether the holder has not renewed the Lease for its duration."""
        seen = (spec.get("holderIdentity"), spec.get("renewTime"), spec.get("leaseTransitions"))
        if seen != self._seen:
            self._seen, self._since = seen, now
        lasts = spec.get("leaseDurationSeconds")
        if not is_number(lasts) or not 0 < lasts < MOST_LEASE_SECONDS:
            lasts = self._seconds
        return now - self._since >= lasts

    def _spec(self, before: dict[str, Any]) -> dict[str, Any]:
        text = datetime.now(UTC).strftime(TIME_FORMAT)
        mine = before.get("holderIdentity") == self._me
        changes = before.get("leaseTransitions", 0)
        counts = type(changes) is int and 0 <= changes < LARGEST_INT
        return {
            **before,
            "holderIdentity": self._me,
            "leaseDurationSeconds": max(1, round(self._seconds)),
            "renewTime": text,
            "acquireTime": before.get("acquireTime", text) if mine else text,
            "leaseTransitions": (changes if counts else 0) + (not mine),
        }

    def release(self) -> None:
        """Do nothing: the Lease expires."""


GuardLease = FileLease | KubernetesLease
"""A right that one guard holds at a time. ``hold`` takes or renews it, and returns None if this
guard has it, else a sentence that says why not."""


def lease(policy: Policy) -> GuardLease:
    """Return the lease that a policy names."""
    if policy.lease.kind == "kubernetes":
        return KubernetesLease(policy)
    return FileLease(Path(policy.folder) / "lease")
