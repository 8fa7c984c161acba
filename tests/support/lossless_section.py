"""``python -m tests.support.lossless_section``: writes the tables of docs/lossless-bench.md."""

from __future__ import annotations

import re

from benchmarks.lossless import RESULTS, tables
from tests.support import REPOSITORY

PAGE = REPOSITORY / "docs" / "lossless-bench.md"


def written() -> str:
    """Return the page with its tables as the result files have them."""
    text = PAGE.read_text(encoding="utf-8")
    for name, lines in tables(RESULTS).items():
        body = "\n".join((f"<!-- {name} -->", *lines, f"<!-- /{name} -->"))
        text = re.sub(
            f"<!-- {name} -->\n.*?<!-- /{name} -->", lambda _, body=body: body, text, flags=re.S
        )
    return text


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
