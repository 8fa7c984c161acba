"""The question to ``outrider ops deploy plan``: a model, its traffic, service levels and fleet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ...base.fields import is_number
from ...base.outside.documents import parse_json, parse_toml
from ...base.outside.models import check_fields
from ...errors import ConfigError, no_option, shown
from ..planning import Situation
from ..planning.acceptance import parse_acceptance
from ..planning.checks import Batch, Share

MOST_REQUESTS_A_SECOND = 1e6
MOST_SECONDS = 86_400.0
LEVELS = ("ttft", "tpot", "e2e")
SITUATION = {each.name for each in fields(Situation)}
SECTIONS = {
    "model": (
        "target", "drafter", "hardware", "tensor_parallel", "dtype", "drafter_dtype", "profile",
        "acceptance", "placement", "drafter_hardware", "longest",
    ),
    "traffic": ("peak", "by_hour", "input_tokens", "output_tokens", "tasks", "temperature"),
    "slo": (*LEVELS, "percentile"),
    "fleet": ("spare", "standby", "max_num_seqs", "price"),
}  # fmt: skip


@dataclass(frozen=True)
class Demand:
    """A question to ``plan``; it is checked on creation, which may raise ConfigError.

    ``by_hour`` are requests per second by hour, or at the peak. A ``percentile`` of requests keeps
    each level of ``slo`` (seconds). ``spare`` replicas may fail at the peak; the plain ``standby``
    takes this share at once, 0 is a warm replica. A replica runs ``max_num_seqs`` sequences.
    """

    situation: Situation
    by_hour: tuple[Annotated[float, Field(ge=0, le=MOST_REQUESTS_A_SECOND)], ...]
    slo: Mapping[str, Annotated[float, Field(ge=0, le=MOST_SECONDS)]]
    percentile: Annotated[float, Field(ge=0.5, le=0.999)] = 0.95
    spare: Annotated[int, Field(ge=0, le=1000)] = 1
    standby: Share = 0.0
    max_num_seqs: Batch = 256

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.by_hour or max(self.by_hour) <= 0:
            raise ConfigError("no traffic is above 0 requests per second; give traffic.peak.")
        if len(self.by_hour) not in (1, 24):
            raise ConfigError(
                f"traffic.by_hour has {len(self.by_hour)} values; give 24, from midnight on."
            )
        for name, level in self.slo.items():
            if name not in LEVELS:
                raise no_option("slo", name, LEVELS)
            if level == 0:
                raise ConfigError(f"slo.{name} is 0 seconds, which nothing keeps; give more.")
        if not self.slo:
            raise ConfigError("slo has no service level; give ttft, tpot or e2e, in seconds.")
        if self.situation.hardware is None and self.situation.profile is None:
            raise ConfigError(
                "nothing says what steps cost; give model.hardware, or model.profile with costs "
                "that outrider serve measured."
            )
        self.situation.target_shape()

    @property
    def peak(self) -> float:
        """Requests per second in the busiest hour."""
        return max(self.by_hour)


def parse_demand(text: str, source: str) -> Demand:
    """Return the demand in a TOML or JSON text; docs/production.md has an example."""
    json = text.lstrip().startswith("{")  # TOML never begins so
    document = parse_json(text, source, unique=True) if json else parse_toml(text, source)
    for name, section in document.items():
        if name not in SECTIONS:
            raise no_option(source, name, list(SECTIONS))
        if not isinstance(section, Mapping):
            raise ConfigError(f"{source}: {name} is {shown(section)}; write a table, [{name}].")
        for key in section:
            if key not in SECTIONS[name]:
                raise no_option(f"[{name}] of {source}", key, SECTIONS[name])
    model, traffic, slo, fleet = (dict(document.get(name, {})) for name in SECTIONS)
    if "target" not in model:
        raise ConfigError(f"{source} names no target; add [model] with target.")
    given = {key: each for key, each in (model | traffic | fleet).items() if key in SITUATION}
    for key in ("target", "drafter", "hardware", "profile", "acceptance", "drafter_hardware"):
        if not isinstance(given.get(key, ""), str):
            raise ConfigError(f"{source}: {key} is {shown(given[key])}; give a text.")
    if "acceptance" in given:
        given["acceptance"] = parse_acceptance(given["acceptance"], given.get("drafter"))
    if "profile" in given:
        given["profile"] = Path(given["profile"])
    rest = {key: each for key, each in fleet.items() if key not in SITUATION}
    if "percentile" in slo:
        rest["percentile"] = slo.pop("percentile")
    return Demand(Situation(**given), _rates(traffic, source), slo, **rest)


def _rates(traffic: Mapping[str, Any], source: str) -> tuple[float, ...]:
    if ("peak" in traffic) == ("by_hour" in traffic):
        raise ConfigError(
            f"{source}: [traffic] needs peak or by_hour, one of them: requests per second."
        )
    if "peak" in traffic and not (is_number(traffic["peak"]) and traffic["peak"] >= 0):
        said = shown(traffic["peak"])
        raise ConfigError(f"{source}: traffic.peak is {said}; give requests per second.")
    rates = traffic.get("by_hour", [traffic.get("peak")])
    if not isinstance(rates, list):
        raise ConfigError(f"{source}: traffic.by_hour is {shown(rates)}; give a list of 24 rates.")
    return tuple(rates)
