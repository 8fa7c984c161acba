"""``python -m tests.support.alerts_section``: what docs/monitoring.md lists."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap

from outrider.ops.alerts.rules import source

WIDTH = 100


def alerts_section() -> Iterator[str]:
    """Yield the lines of all thresholds, then of every alert with its runbook."""
    yield "| threshold | default | meaning |"
    yield "| -- | -- | -- |"
    for name, each in source()["threshold"].items():
        yield f"| `{name}` | {each['value']:g} | {each['help']} |"
    for alert in source()["alert"]:
        limits = " and ".join(
            f"{severity} (`{limit}`)" if limit else severity
            for severity, limit in alert["severities"].items()
        )
        yield from ("", f"### {alert['name']}", "")
        yield f"{limits[0].upper()}{limits[1:]}, after {alert['for'].removesuffix('m')} minutes."
        yield from ("", *_paragraphs(alert["runbook"]))


def _paragraphs(runbook: str) -> Iterator[str]:
    """Yield a runbook's lines; a list stands apart from what is before it."""
    before = ""
    for line in runbook.strip().splitlines():
        if line.startswith("1. ") and before:
            yield ""
        yield from wrap(line, WIDTH, subsequent_indent="   " if line[:1].isdigit() else "",
                        break_long_words=False, break_on_hyphens=False)  # fmt: skip
        before = line


def main() -> None:
    """Print the section between the marks that it has in the docs."""
    print("\n".join(("<!-- alerts -->", *alerts_section(), "<!-- /alerts -->")))


if __name__ == "__main__":
    main()
