"""Sorts the options of ``LLM`` by the part that they configure."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ...base.limits import LOOKUP
from ...base.vllm_names import translate


class Given(NamedTuple):
    """The given options of ``LLM``: of ``EngineConfig``, and of the drafter ngram (``lookup``)."""

    drafter: Any
    tokenizer: Any
    lookup: dict[str, Any]
    engine: dict[str, Any]

    @property
    def options(self) -> dict[str, Any]:
        """All options but the drafter, in the form that ``given`` takes."""
        return {**self.engine, **self.lookup, "tokenizer": self.tokenizer}


def given(drafter: Any, options: Mapping[str, Any]) -> Given:
    """Return the sorted arguments of ``LLM`` without None; ConfigError for a wrong vLLM name."""
    values = translate(options)
    drafter = values.pop("drafter", drafter)
    values = {name: value for name, value in values.items() if value is not None}
    lookup = {name: values.pop(name) for name in LOOKUP if name in values}
    return Given(drafter, values.pop("tokenizer", None), lookup, values)
