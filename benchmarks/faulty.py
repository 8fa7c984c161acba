"""``outrider serve`` with a fault in place of the ratio rule: python -m benchmarks.faulty serve ...

The variable ``FAULT_OF_OUTRIDER`` names the fault, as ``outrider verify --fault`` does. The process
of the engine imports this module too, and reads it there.
"""

import os
from functools import partial

from outrider.audit.faults import FAULTS
from outrider.errors import ConfigError
from outrider.sampling.ratio import RULES, Ratio

VARIABLE = "FAULT_OF_OUTRIDER"


def rule_of(fault: str) -> Ratio:
    """Return the rule that a fault puts in. Raises ConfigError: it is no fault of a rule."""
    rules = {name: known.rule for name, known in FAULTS.items() if known.rule is not None}
    if fault not in rules:
        raise ConfigError(f"{VARIABLE} is {fault!r}; give one of {', '.join(rules)}.")
    return rules[fault]


if name := os.environ.get(VARIABLE):
    RULES["rejection"] = partial(rule_of, name)

if __name__ == "__main__":
    from outrider.cli import main

    main()
