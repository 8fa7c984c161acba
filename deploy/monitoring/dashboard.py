"""Writes Grafana's dashboard, with Grafana's foundation SDK.

    pip install 'grafana-foundation-sdk==1769699998!10.1.0'
    python deploy/monitoring/dashboard.py > src/outrider/ops/alerts/data/dashboard.json

The SDK is needed here only: `outrider ops alerts dashboard` prints the committed file.
"""

from __future__ import annotations

from itertools import count
from typing import NamedTuple

from grafana_foundation_sdk.builders.common import VizLegendOptions
from grafana_foundation_sdk.builders.dashboard import (
    Dashboard,
    DatasourceVariable,
    QueryVariable,
    Row,
    TextBoxVariable,
)
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.builders.timeseries import Panel as TimeSeries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    LegendDisplayMode,
    LegendPlacement,
    TimeZoneBrowser,
)
from grafana_foundation_sdk.models.dashboard import (
    DataSourceRef,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
ON = 'job=~"$job", instance=~"$instance", model_name=~"$model"'
RANGE = "[$__rate_interval]"
SHARES = {"P50": 0.5, "P90": 0.9, "P95": 0.95, "P99": 0.99}
HEIGHT, WIDTH = 8, 8
DRAFTED, ACCEPTED, DRAFTS = (
    f"vllm:spec_decode_num_{name}_total" for name in ("draft_tokens", "accepted_tokens", "drafts")
)


class Plot(NamedTuple):
    """A panel: its lines as (expression, legend)."""

    title: str
    unit: str
    text: str
    lines: tuple[tuple[str, str], ...]


def rate(name: str, by: str = "instance", more: str = "") -> str:
    """Return the growth of a counter a second, summed by labels."""
    return f"sum by ({by}) (rate({name}{{{ON}{more}}}{RANGE}))"


def gauge(name: str, by: str = "instance") -> str:
    """Return a gauge, summed by labels."""
    return f"sum by ({by}) ({name}{{{ON}}})"


def percentiles(title: str, name: str, text: str) -> Plot:
    """Return the panel of a histogram of seconds."""
    buckets = rate(f"vllm:{name}_seconds_bucket", "le")
    lines = tuple((f"histogram_quantile({q}, {buckets})", label) for label, q in SHARES.items())
    return Plot(title, "s", text, lines)


SPECULATION = (
    Plot(
        "Acceptance", "percentunit",
        "Accepted tokens / drafted tokens. A draft tree counts by its depth, not by its nodes.",
        ((f"{rate(ACCEPTED)} / {rate(DRAFTED)}", "{{instance}}"),),
    ),
    Plot(
        "Acceptance by position", "percentunit",
        "Share of drafts that are accepted up to each position. Positions start at 0.",
        ((f"{rate('vllm:spec_decode_num_accepted_tokens_per_pos_total', 'position')} "
          f"/ on () group_left () sum(rate({DRAFTS}{{{ON}}}{RANGE}))", "position {{position}}"),),
    ),
    Plot(
        "Acceptance length", "none",
        "1 + accepted tokens / drafts: the mean number of tokens per step that verifies a draft.",
        ((f"1 + {rate(ACCEPTED)} / {rate(DRAFTS)}", "{{instance}}"),),
    ),
    Plot(
        "Drafted and accepted tokens per second", "none", "",
        ((rate(DRAFTED), "drafted {{instance}}"), (rate(ACCEPTED), "accepted {{instance}}")),
    ),
    Plot(
        "Draft length K", "none",
        "In use: the longest draft that Outrider currently allows. Mean: drafted tokens / drafts.",
        ((gauge("outrider_draft_length"), "in use {{instance}}"),
         (f"{rate(DRAFTED)} / {rate(DRAFTS)}", "mean {{instance}}")),
    ),
    Plot(
        "Reasons for K", "none",
        "Outrider only. If nothing is drafted, this shows the reason. Otherwise it shows `drafts`, "
        "and the draft depth that the engine chose for each method.",
        ((f"{gauge('outrider_speculation_off', 'instance, reason')} or label_replace("
          f'{gauge("outrider_draft_length")} > bool 0, "reason", "drafts", "", "") == 1',
          "{{reason}} {{instance}}"),
         (gauge("outrider_choice_depth", "instance, method"), "depth of {{method}} {{instance}}"),
         (gauge("outrider_speculation_paused"), "paused {{instance}}")),
    ),
    Plot(
        "Speedup", "none",
        "Outrider, by drafter: emitted tokens times the time of a plain step, divided by the time "
        "taken. Exporter: time per output token of a standby or baseline, divided by that of the "
        "engine.",
        ((f"outrider_speedup{{{ON}}}", "{{drafter}} {{instance}}"),
         ('outrider_observed_speedup{model_name=~"$model"}', "against {{against}} {{instance}}")),
    ),
)  # fmt: skip
LATENCY = (
    percentiles("TTFT", "time_to_first_token", "Time to first token."),
    percentiles(
        "ITL", "inter_token_latency",
        "Time between two outputs. One output may contain several tokens.",
    ),
    percentiles("E2E", "e2e_request_latency", "Time from the arrival of a request to its end."),
    Plot(
        "Goodput and throughput", "none",
        "Requests per second that met the server's SLO (Outrider only), and output tokens per "
        "second.",
        ((rate("outrider_good_requests_total"), "good requests/s {{instance}}"),
         (rate("vllm:generation_tokens_total"), "tokens/s {{instance}}")),
    ),
    Plot(
        "Failed requests per second", "none", "By status code, including 4xx (Outrider only).",
        ((rate("outrider_request_errors_total", "instance, code"), "{{code}} {{instance}}"),),
    ),
    Plot(
        "Cost", "currencyUSD",
        "Dollars per million output tokens: the hourly price of all shown instances together, "
        "divided by the tokens that they generate in an hour.",
        ((f"$price / 3600 * 1e6 / sum(rate(vllm:generation_tokens_total{{{ON}}}{RANGE}))",
          "per million tokens"),),
    ),
)  # fmt: skip
LOAD = (
    Plot(
        "Requests", "none", "",
        ((gauge("vllm:num_requests_running"), "running {{instance}}"),
         (gauge("vllm:num_requests_waiting"), "waiting {{instance}}")),
    ),
    Plot(
        "KV cache", "percentunit", "Share of cache pages in use.",
        ((f"max by (instance) (vllm:kv_cache_usage_perc{{{ON}}})", "{{instance}}"),),
    ),
    Plot("Preemptions per second", "none", "",
         ((rate("vllm:num_preemptions_total"), "{{instance}}"),)),
    Plot(
        "GPU utilisation", "percentunit",
        "Share of time with a running kernel, from dcgm-exporter or outrider ops alerts exporter.",
        (("DCGM_FI_DEV_GPU_UTIL / 100", "GPU {{gpu}} {{instance}}"),
         ("outrider_observed_gpu_utilisation", "GPU {{gpu}} {{instance}}")),
    ),
    Plot(
        "GPU memory", "bytes", "Memory in use, including the engine's preallocated share.",
        (("DCGM_FI_DEV_FB_USED * 1048576", "GPU {{gpu}} {{instance}}"),
         ("outrider_observed_gpu_memory_used_bytes", "GPU {{gpu}} {{instance}}")),
    ),
    Plot(
        "Rollback", "none", "State of outrider ops guard, and whether its standby is warm.",
        (("outrider_guard_state == 1", "{{state}}"),
         ("outrider_guard_standby_warm", "standby warm"),
         (f"sum by (action, signal) (increase(outrider_guard_actions_total{RANGE}))",
          "{{action}} for {{signal}}")),
    ),
)  # fmt: skip
ROWS = {"Speculation": SPECULATION, "Latency and cost": LATENCY, "Load, machine, rollback": LOAD}


def panel(plot: Plot) -> TimeSeries:
    """Return Grafana's panel."""
    found = (
        TimeSeries().title(plot.title).description(plot.text).unit(plot.unit).min(0)
        .datasource(SOURCE).height(HEIGHT).span(WIDTH).fill_opacity(8)
        .legend(
            VizLegendOptions().display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM).show_legend(True)
        )
    )  # fmt: skip
    for expression, legend in plot.lines:
        found.with_target(
            Dataquery().expr(expression).legend_format(legend).range().datasource(SOURCE)
        )
    return found


def choice(name: str, label: str, query: str) -> QueryVariable:
    """Return a variable with the values of a label, all of them at first."""
    return (
        QueryVariable(name).label(label).datasource(SOURCE).query(query).multi(True)
        .include_all(True).all_value(".*").refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .current(VariableOption(selected=True, text="All", value="$__all"))
    )  # fmt: skip


def dashboard() -> Dashboard:
    """Return the dashboard: for Outrider and vLLM, which the first variables choose from."""
    served = "vllm:generation_tokens_total"
    found = (
        Dashboard("Speculative decoding: Outrider and vLLM").uid("outrider-speculation")
        .description("docs/monitoring.md explains the figures and alerts.")
        .tags(["llm", "speculative-decoding"]).timezone(TimeZoneBrowser).editable()
        .refresh("30s").time("now-1h", "now")
        .with_variable(DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(choice("job", "Server", f"label_values({served}, job)"))
        .with_variable(
            choice("instance", "Instance", f'label_values({served}{{job=~"$job"}}, instance)')
        )
        .with_variable(
            choice("model", "Model", f'label_values({served}{{job=~"$job"}}, model_name)')
        )
        .with_variable(
            TextBoxVariable("price").label("Dollars per hour").default_value("1")
            .current(VariableOption(text="1", value="1"))
        )
    )  # fmt: skip
    ids = count(1)
    for title, plots in ROWS.items():
        found.with_row(Row(title).id(next(ids)))
        for plot in plots:
            found.with_panel(panel(plot).id(next(ids)))
    return found


def main() -> None:
    """Print the dashboard."""
    print(JSONEncoder(sort_keys=True, indent=1).encode(dashboard().build()))


if __name__ == "__main__":
    main()
