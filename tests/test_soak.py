"""What the soak test compares; the soak itself is a command of its own."""

from outrider.bench.soak import Item, Seen, compare, grown


def test_growth_is_of_what_has_settled() -> None:
    memory = [(float(i), 50 if i < 30 else 100) for i in range(120)]
    assert grown(memory, 40) == 1
    assert grown([*memory, *((120.0 + i, 200) for i in range(30))], 40) == 2
    assert grown(memory, 119) == 1


def test_another_text_is_noted() -> None:
    seen = Seen()
    compare(Item({}, ["a", "b"]), ["a", "b"], seen)
    assert not seen.wrong
    compare(Item({}, ["a", "b"]), ["a", "c"], seen)
    assert len(seen.wrong) == 1
    assert seen.ended["complete"] == 2
