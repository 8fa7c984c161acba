"""``outrider.ops.planning.roi``: worked examples, cases, and inputs that make no sense."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from datetime import date
from html.parser import HTMLParser
from typing import Any

import pytest

from outrider.errors import ConfigError
from outrider.ops.planning import Plan, Roi, Situation, advise, read_advice, roi
from outrider.ops.planning.roi import CASES, roi_html, roi_markdown, speedups_of

ADVICE = advise(Situation("llama-3.1-8b", hardware="h100"))


def asked(devices: int = 4, price: float = 4.0, **options: Any) -> Roi:
    return roi(Plan(devices, price, **{"speedup": (2.0, 2.5, 3.0), **options}))


def test_ten_million_requests_a_month_on_four_a100_pay_in_17_days() -> None:
    found = asked(
        speedup=(2.2, 2.5, 2.5), days=5, requests=1e7, p50=2.5, p95=8.0, utilisation=0.45,
        start=date(2026, 12, 7),
    )  # fmt: skip
    base = found.cases["base"]
    assert base.cost.value == 5 * 800 == 4000
    assert base.saved_a_month.value == pytest.approx(7008)
    assert base.break_even_days.value == pytest.approx(17, abs=0.5)
    for case in found.cases.values():
        assert 14 <= case.break_even_days.value <= 21  # two to three weeks
    assert found.latency["p50"].value == pytest.approx(1.0)
    assert found.latency["p95"].value == pytest.approx(3.3, rel=0.04)
    assert base.roi.value == pytest.approx((12 * 7008 - 4000) / 4000)
    assert found.spent_a_month.value == pytest.approx(4 * 4 * 730)


def test_twelve_hundred_users_on_eight_a100_avoid_twelve_devices() -> None:
    found = asked(8, speedup=(2.4, 2.4, 2.4), users=500)
    capacity = {name: each.value for name, each in found.capacity.items()}
    assert capacity == {"users": 1200, "extra_users": 700, "devices_avoided": 12}


def test_work_ends_on_a_working_day_and_break_even_counts_from_there() -> None:
    found = asked(days=5, speedup=(2.5, 2.5, 2.5), start=date(2026, 12, 7))
    # Five working days are a week; then 17.4 days until the 4,000 are back.
    assert found.cases["base"].break_even_date == date(2027, 1, 1).isoformat()


@pytest.mark.parametrize(
    ("option", "days", "memory"),
    [
        ("draft-model", (2, 5), (0.05, 0.10)), ("eagle3", (3, 7), (0.03, 0.05)),
        ("tensorrt-llm", (20, 30), (0.05, 0.10)), ("custom-drafter", (10, 20), None),
    ],
)  # fmt: skip
def test_options_take_the_time_that_is_told(
    option: str, days: tuple[float, float], memory: tuple[float, float] | None
) -> None:
    found = asked(option=option)
    assert (found.days, found.memory) == (days, memory)
    low, high = found.cases["low"].cost.value, found.cases["high"].cost.value
    training = (100 * 4.0, 500 * 4.0) if option == "custom-drafter" else (0, 0)
    assert high == pytest.approx(800 * days[0] + training[0])
    assert low == pytest.approx(800 * days[1] + training[1])


def test_cases_are_in_order() -> None:
    found = asked(option="custom-drafter")
    for name in ("saved_a_month", "roi", "net_first_year", "device_hours_saved"):
        values = [getattr(found.cases[case], name).value for case in ("low", "base", "high")]
        assert values == sorted(values)
        assert values[0] < values[2]
    for case, line in found.balance.items():
        assert line[0].value == -found.cases[case].cost.value
        assert line[12].value == pytest.approx(found.cases[case].net_first_year.value)


def test_latency_is_worth_what_is_given_and_nothing_otherwise() -> None:
    options = {"speedup": (2.0, 2.0, 2.0), "requests": 1e6, "p50": 2.0}
    without, with_value = asked(**options), asked(value_of_second=0.001, **options)
    assert without.cases["base"].latency_value_a_month.value == 0
    assert with_value.cases["base"].latency_value_a_month.value == pytest.approx(1000)
    more = with_value.cases["base"].net_first_year.value
    assert more == pytest.approx(without.cases["base"].net_first_year.value + 12_000)


def test_what_is_slower_never_pays() -> None:
    found = asked(speedup=(0.8, 1.0, 1.2))
    assert found.cases["low"].break_even_days is None
    assert found.cases["low"].saved_a_month.value < 0
    assert found.cases["base"].break_even_date is None
    assert found.cases["high"].break_even_days.value > 0
    assert any("never pays" in note for note in found.notes)
    assert "never" in roi_markdown(found)


def test_what_pays_after_the_calendar_ends_has_no_date() -> None:
    case = asked(speedup=(1.0001,) * 3, start=date(9999, 12, 1)).cases["base"]
    assert case.break_even_days.value > 1000
    assert case.break_even_date is None


def test_speedups_come_from_an_advice() -> None:
    low, base, high = speedups_of(read_advice(json.dumps(ADVICE.to_json()), "advice.json"))
    assert (low, base, high) == tuple(each.value for each in ADVICE.speedup.values())
    with pytest.raises(ConfigError, match="no speedup"):
        speedups_of(replace(ADVICE, speedup={}))


class Reader(HTMLParser):
    """Notes what a page opens, closes and loads."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta",):
            self.open.append(tag)
        self.loads += [value for name, value in attributes if name in ("src", "href") and value]

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_stands_alone() -> None:
    page = roi_html(asked(users=500, requests=1e6, p50=2.0))
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    assert reader.loads == []
    assert page.count("<svg") == 1
    assert all(f">{case}</text>" in page for case in CASES)
    assert "(modelled)" in page


def test_markdown_and_json_have_the_evidence() -> None:
    found = asked(users=500)
    text = roi_markdown(found)
    assert "| cost of the work | $4,000 (modelled) |" in text
    assert "work: 2 to 5 days (assumed)" in text
    content = json.loads(json.dumps(found.to_json()))
    assert content["cases"]["base"]["cost"] == {
        "value": 2800.0,
        "unit": "$",
        "evidence": "modelled",
    }


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"devices": 0}, "devices is 0"), ({"devices": 2.5}, "devices is 2.5"),
        ({"price": -4.0}, "price is -4"), ({"price": float("inf")}, "price is inf"),
        ({"speedup": (2.0, 1.0, 3.0)}, "rising"), ({"speedup": (0.0, 1.0, 2.0)}, "rising"),
        ({"speedup": (1.0, 2.0)}, "2 values"), ({"speedup": (1.0, 2.0, float("nan"))}, "nan"),
        ({"speedup": (1.0, 2.0, 1e9)}, "from 0 to 100"), ({"option": "magic"}, "option is 'magic'"),
        ({"days": -1}, "days is -1"), ({"day": "much"}, "day is 'much'"),
        ({"utilisation": 45}, "utilisation is 45"), ({"users": 0}, "users is 0"),
        ({"value_of_second": 0.1}, "needs p50 and the requests"),
        ({"p50": -1}, "p50 is -1"), ({"requests": float("nan")}, "requests is nan"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_sentence(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as refused:
        asked(**options)
    assert "\n" not in str(refused.value)


def test_without_matplotlib_the_page_says_how_to_get_the_picture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "outrider.base.plots", raising=False)
    page = roi_html(asked())
    assert "pip install &#x27;outrider[plot]&#x27;" in page
    assert "(modelled)" in page
