"""Checks of the Host and Origin headers, against pages that rebind a DNS name.

A browser sends the name in the address bar. A foreign page can have its own name resolve to this
machine, but cannot do so with an IP address, with localhost, or with a name without a dot.
"""

import ipaddress
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from .settings import Settings

AUTHORITY = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[^\s:/@?#\[\]\\]+)(?::\d{0,5})?")
PORTS = {"http": ":80", "https": ":443"}
OF_PROXIES = re.compile(
    r"forwarded|via|x-forwarded-.*|x-real-ip|x-client-ip|x-cluster-client-ip|true-client-ip|cf-.*"
)


def bare(authority: str) -> str | None:
    """Return the name in ``name:port``, in lower case, without brackets; None if malformed."""
    match = AUTHORITY.fullmatch(authority)
    return match["name"].strip("[]").removesuffix(".").lower() if match else None


def address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return ``name`` as an IP address; None if it is not one."""
    try:
        ip = ipaddress.ip_address(name)
    except ValueError:
        return None
    return getattr(ip, "ipv4_mapped", None) or ip  # of an IPv6 address


def is_loopback(name: str) -> bool:
    """Return True for localhost, 127.0.0.0/8 and ::1."""
    ip = address(name)
    return name == "localhost" if ip is None else ip.is_loopback


def is_named(name: str, settings: Settings) -> bool:
    """Return True for loopback names and those of ``--allowed-hosts``."""
    return is_loopback(name) or not {name, "*"}.isdisjoint(settings.allowed_hosts)


def host_is_ours(host: str, settings: Settings) -> bool:
    """Return True for a Host header that no foreign page can send."""
    name = bare(host)
    if name is None:
        return False
    if is_named(name, settings) or name == settings.host.lower():
        return True
    return not is_loopback(settings.host) and (address(name) is not None or "." not in name)


def origin_is_ours(origin: str, host: str, settings: Settings) -> bool:
    """Return True for an Origin header of a page from this server, an allowed name or origin."""
    if not {origin, "*"}.isdisjoint(settings.allowed_origins):
        return True
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    name = bare(parts.netloc)
    if parts.scheme not in PORTS or name is None:
        return False
    end = PORTS[parts.scheme]
    same = parts.netloc.lower().removesuffix(end) == host.lower().removesuffix(end)
    return same or is_named(name, settings)


def from_this_machine(headers: Mapping[str, str], peer: str | None) -> bool:
    """Return True for a call from a loopback address, by a loopback name, and not by a proxy."""
    name = bare(headers.get("host", ""))
    direct = not any(OF_PROXIES.fullmatch(header.lower()) for header in headers)
    return direct and is_loopback(peer or "") and is_loopback(name or "")
