"""Four verdicts about drafts, each from the checks of an audit that concern it."""

from collections.abc import Callable, Sequence

from .outcome import Column, Result, Status, Verdict

LATER = ": later tokens"
AS_PLAIN = ", as plain"
NEEDS_PLAIN = "needs --reference with the address of the same server without drafts"
NOTHING_DRAFTED = "the server drafted nothing in these checks"


def columns(results: Sequence[Result]) -> list[Column]:
    """Return the verdicts in the order of the table."""
    return [
        _column("T = 0", [r for r in results if r.name.startswith("greedy")], _shows),
        _column("T > 0", [r for r in results if r.name.startswith("law")], shows_law),
        _column("per seed", [r for r in results if r.name.startswith("seed")], _as_plain),
        _column("structured", [r for r in results if _formed(r)], _as_plain),
    ]


def _formed(result: Result) -> bool:
    return result.name.startswith(("json_schema, as", "regex, as"))


def _shows(result: Result) -> bool:
    return True


def shows_law(result: Result) -> bool:
    """Return whether a law test judged tokens that may have been drafted."""
    told = result.status in (Status.PASSED, Status.FAILED)
    return told and result.name.endswith((LATER, AS_PLAIN))


def _as_plain(result: Result) -> bool:
    return result.name.endswith(AS_PLAIN)


def _column(name: str, results: Sequence[Result], shows: Callable[[Result], bool]) -> Column:
    """Return a verdict; it holds only if some result ``shows`` it."""
    drafted = max((r.drafted for r in results if r.drafted is not None), default=None)
    wrong = [r for r in results if r.status in (Status.FAILED, Status.DIFFERS)]
    right = [r for r in results if r.status is Status.PASSED and shows(r)]
    if wrong:
        return Column(name, Verdict.FAILS, f"{wrong[0].name}: {wrong[0].seen}", drafted)
    if right and drafted == 0:
        return Column(name, Verdict.UNKNOWN, NOTHING_DRAFTED, drafted)
    if right:
        seen = "; ".join(f"{one.name}: {one.seen}" for one in right)
        return Column(name, Verdict.HOLDS, seen, drafted)
    why = "; ".join(f"{r.name}: {r.seen}" for r in results if r.status is not Status.PASSED)
    return Column(name, Verdict.UNKNOWN, why or NEEDS_PLAIN, drafted)
