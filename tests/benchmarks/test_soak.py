"""What the soak test compares; the soak itself is a command of its own."""

from benchmarks.common import percentiles
from benchmarks.soak import SLOWDOWN, Item, Seen, check_texts, grown, slowdown


def test_growth_is_of_what_has_settled() -> None:
    memory = [(float(i), 50 if i < 30 else 100) for i in range(120)]
    assert grown(memory, 40) == 1
    assert grown([*memory, *((120.0 + i, 200) for i in range(30))], 40) == 2
    assert grown(memory, 119) == 1


def test_another_text_is_noted() -> None:
    seen = Seen()
    check_texts(Item({}, ["a", "b"]), ["a", "b"], seen)
    assert not seen.wrong
    check_texts(Item({}, ["a", "b"]), ["a", "c"], seen)
    assert len(seen.wrong) == 1
    assert seen.ended["complete"] == 2


def test_a_slowdown_is_a_ratio_of_p99s() -> None:
    alone = {"latency": percentiles([0.1] * 98 + [1.0] * 3)}
    beside = {"latency": percentiles([0.1] * 98 + [1.9] * 3)}
    assert slowdown(alone, beside) == {"p99_ratio": 1.9, "allowed": SLOWDOWN, "passed": True}
    worse = {"latency": percentiles([2.1] * 100)}
    assert not slowdown(alone, worse)["passed"]
    assert percentiles([]) == {"p50": 0.0, "p99": 0.0}
