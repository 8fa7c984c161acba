"""What is measured while steps run."""

import pytest

from outrider.engine.pace import FEWEST_ROWS, PROBED, STALL_SECONDS, Gain, Pace


def test_a_chunk_is_as_long_as_streams_may_wait() -> None:
    pace = Pace()
    assert pace.chunk(512) == 512
    pace.observe(rows=4, decoding=4, seconds=0.005)
    pace.observe(rows=20, decoding=4, seconds=9.0)  # too few to tell
    assert pace.chunk(512) == 512
    pace.observe(rows=100, decoding=0, seconds=0.02)
    assert pace.chunk(512) == int(STALL_SECONDS / 0.0002)
    pace.observe(rows=4, decoding=4, seconds=1.0)
    assert pace.chunk(512) == 512  # where a step takes long, a chunk may too
    slow = Pace(per_row=1.0)
    assert slow.chunk(512) == FEWEST_ROWS


def test_the_gain_is_against_plain_steps_of_as_many() -> None:
    gain = Gain()
    assert gain.due(2)
    gain.drafted("a", 2, 6, 0.02)
    assert not gain.speedups
    gain.plain(2, 0.01)
    assert not gain.due(2)
    assert gain.due(3)
    gain.drafted("a", 2, 8, 0.02)  # 4 tokens each in the time of 2 plain steps
    assert gain.speedups == {"a": pytest.approx(2.0)}
    for _ in range(PROBED - 1):
        gain.drafted("a", 2, 8, 0.02)
    assert gain.due(2)
