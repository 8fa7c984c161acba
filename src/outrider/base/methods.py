"""The table of drafting methods: our names, and the names that other engines and guides use."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from ..errors import ConfigError, shown

AUTO, NONE = "auto", "none"
"""Names of drafters: the engine's own choice, and plain decoding."""
PREDICTION = "prediction"
"""Name of the drafter that drafts a request's expected output."""
TOGETHER = "+"
"""Joins the names of drafters whose drafts are merged."""
OTHERWISE = " or "
"""Joins the names of a lookup and of the drafter used where it is more promising."""


@dataclass(frozen=True)
class Method:
    """A way to draft, by its name in commands, specs and advice.

    ``others`` are its names in engines and guides, in lower case with underscores. With
    ``checkpoint`` it drafts with a checkpoint of its own, which must be named. ``ours`` is this
    engine's drafter, and ``costs`` the form of its costs in ``ops.planning``; None for none.
    """

    name: str
    others: tuple[str, ...] = ()
    checkpoint: bool = False
    ours: str | None = None
    costs: str | None = None

    @property
    def head(self) -> bool:
        """True if it drafts with a head on the target's states, whose costs are known."""
        return self.checkpoint and self.costs not in (None, "model")


TABLE = (
    Method("none", ours="none"),
    Method(
        "draft_model", ("model", "draft", "standalone", "draft_target", "draft_target_model",
        "draft_tokens_external", "draft_simple"), checkpoint=True, ours="model", costs="model",
    ),
    Method(
        "ngram", ("ngram_gpu", "ngram_simple", "prompt_lookup", "prompt_lookup_decoding", "pld"),
        ours="ngram", costs="lookup",
    ),
    Method("suffix", ("sa", "suffix_decoding", "ngram_mod"), ours="suffix", costs="lookup"),
    Method(
        "eagle", ("eagle1", "eagle_1", "eagle2", "eagle_2"), checkpoint=True, ours="eagle3",
        costs="eagle",
    ),
    Method(
        "eagle3", ("eagle_3", "draft_eagle3"), checkpoint=True, ours="eagle3", costs="eagle3",
    ),
    Method("medusa", checkpoint=True, ours="medusa", costs="medusa"),
    Method("mlp_speculator", checkpoint=True),
    Method("mtp", ("nextn", "draft_mtp", "eagle_mtp"), ours="mtp"),
    Method("dflash", ("draft_dflash", "dflash2"), checkpoint=True, ours="dflash"),
    Method("dspark", ("draft_dspark",), checkpoint=True, ours="dflash"),
    Method("speculators", checkpoint=True, ours="eagle3"),
    Method("layerskip", ("layer_skip", "self_speculation"), ours="layerskip", costs="layerskip"),
)  # fmt: skip
BY_NAME = {name: each for each in TABLE for name in (each.name, *each.others)}
NAMES = tuple(each.name for each in TABLE)
LOOKUPS = tuple(each.name for each in TABLE if each.costs == "lookup")
WITH_CHECKPOINT = tuple(each.name for each in TABLE if each.checkpoint)


def find_method(name: object) -> Method | None:
    """Return the method that a name in any engine's spelling means, such as ``EAGLE3``, or None.

    Old names of MTP in vLLM end in ``_mtp``; brackets are for ``[ngram]``.
    """
    if not isinstance(name, str):
        return None
    plain = name.strip().strip("[]").lower().replace("-", "_")
    return BY_NAME.get("mtp" if plain.endswith("_mtp") else plain)


def suggested_method(checkpoint: str) -> str:
    """Return the method that the name of a drafter's checkpoint suggests."""
    name = checkpoint.lower().replace("-", "").replace("_", "")
    for method in ("eagle3", "eagle", "medusa", "dflash", "dspark"):
        if method in name:
            return method
    return "draft_model"


def named_method(name: object, where: str) -> Method:
    """Return the method that a name means; errors call what was given ``where``."""
    method = find_method(name)
    if method is None:
        near = difflib.get_close_matches(str(name), NAMES, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"give {', '.join(NAMES)}."
        raise ConfigError(f"{where} is {shown(name)}; {hint}")
    return method
