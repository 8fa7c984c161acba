"""What a start learns of a model's forward in a moment."""

from typing import cast

from outrider.engine.measure import finished, measure
from outrider.models.base import RowsModel, Store


class SlowModel:
    """Its forward takes 40 ms for up to six rows, and 5 ms for each row more."""

    def new_store(self, num_pages: int, page_size: int) -> None:
        return None

    def page_bytes(self, page_size: int) -> int:
        return 0


def seconds(model: RowsModel, store: Store, rows: int) -> float:
    return 0.04 + 0.005 * max(0, rows - 6)


def test_few_forwards_of_a_slow_model_tell_the_shape_of_its_curve() -> None:
    curve, _ = finished(measure(cast(RowsModel, SlowModel()), 16, 200, 0.1, seconds))
    assert len(curve.rows) == 3
    for rows in (1, 4, 6, 8, 16, 32):
        assert abs(curve.at(rows) - 0.04 - 0.005 * max(0, rows - 6)) < 1e-9


def test_rows_are_measured_as_far_as_a_step_may_have_them() -> None:
    curve, _ = finished(measure(cast(RowsModel, SlowModel()), 16, 9, 60.0, seconds))
    assert curve.rows == (1, 2, 3, 4, 6, 8)
    assert [*curve.seconds] == [
        seconds(cast(RowsModel, None), cast(Store, None), n) for n in curve.rows
    ]
