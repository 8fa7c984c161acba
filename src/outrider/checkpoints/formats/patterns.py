"""Names of modules in compressed-tensors' configs: whole, or as a regular expression.

Expressions are matched by llguidance, whose engine takes linear time: an expression from a file
cannot make it backtrack.
"""

from functools import lru_cache

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from ...base.fields import Fields
from ...errors import ModelError, shown

EXPRESSION = "re:"
LONGEST = 1000
"""Most characters of an expression."""
MOST = 1000
"""Most targets of a scheme."""


def patterns(fields: Fields, name: str) -> list[str]:
    """Return the targets in the list ``name``."""
    targets: list[str] = fields.listed(name, str)
    if len(targets) > MOST:
        raise ModelError(f"{fields.where}: {name} has {len(targets)} items; {MOST} are read.")
    for target in targets:
        if target.startswith(EXPRESSION):
            matcher = _matcher(target.removeprefix(EXPRESSION))
            if len(target) > LONGEST or matcher.is_error():
                raise ModelError(
                    f"{fields.where}: {name} has {shown(target)}; a regular expression without "
                    f"look-around, of at most {LONGEST} characters, is needed."
                )
    return targets


@lru_cache(maxsize=4096)
def matches(target: str, module: str) -> bool:
    """Return whether ``target`` names ``module``: an expression matches from its beginning on."""
    if not target.startswith(EXPRESSION):
        return target == module
    matcher = _matcher(target.removeprefix(EXPRESSION))
    octets = list(module.encode())
    return matcher.try_consume_tokens(octets) == len(octets) and matcher.is_accepting()


def _matcher(expression: str) -> LLMatcher:
    text = expression[:LONGEST].removeprefix("^")
    # The engine matches whole texts and knows no anchors.
    ends = text.endswith("$") and not text.endswith("\\$")
    grammar = grammar_from("regex", text.removesuffix("$") if ends else f"(?:{text})(?s:.*)")
    return LLMatcher(_octets(), grammar, limits=LLParserLimits(), log_level=0)


@lru_cache(maxsize=1)
def _octets() -> LLTokenizer:
    return LLTokenizer("byte")
