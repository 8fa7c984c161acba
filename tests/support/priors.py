"""What the specifications of our drafters expect of them at first."""

from outrider.drafters.registry import known_specs

PRIORS = {name: spec.prior for name, spec in known_specs().items()}
