"""A summary of what a controller believes, for people to look at."""

from typing import Any

from .controller import Controller

SHOWN_ROWS = (1, 2, 4, 8, 16, 32, 64)  # rows whose cost is shown
SHOWN_DEPTH = 4  # most tokens of the draft whose cost is shown


def summary(controller: Controller) -> dict[str, Any]:
    """Return choices, expected tokens per second, survival, milliseconds and pauses, as JSON.

    ``choices`` are those of the last review; their ``drafters`` are empty for plain decoding. The
    cost of a draft is that of one sequence. ``pauses`` are steps, by the smallest batch size that
    they are for. Workloads are not named, since their names contain requests' ``cache_salt``.
    """
    methods, costs = controller.methods, controller.costs
    return {
        "choices": [
            {
                "methods": list(group.methods),
                "levels": list(group.levels),
                "fixed": group.fixed is not None,
                "method": choice.method,
                "drafters": list(methods[choice.method].drafters) if choice.depth else [],
                "depth": choice.depth,
                "sequences": controller.counts.get(group, 0),
            }
            for group, choice in controller.choices.items()
        ],
        "paused": controller.paused,
        "tokens_per_second": round(controller.review.tokens_per_second, 1),
        "plain_tokens_per_second": round(controller.review.plain_per_second, 1),
        "survival": {
            name: {**rates, "survival": rates["survival"][: methods[name].max_depth]}
            for name, rates in controller.survival.summary().items()
        },
        "verify_ms": {str(rows): _ms(costs.verify(rows, 0)) for rows in SHOWN_ROWS},
        "draft_ms": {
            name: _ms(method.seconds(costs, [1] * min(SHOWN_DEPTH, method.max_depth)))
            for name, method in methods.items()
        },
        "explored": round(controller.trials.explored / max(controller.trials.seconds, 1e-9), 4),
        "pauses": {str(size): steps for size, steps in controller.pauses.items()},
    }


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
