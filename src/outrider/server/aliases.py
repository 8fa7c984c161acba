"""Other spellings of a path: below a proxy's path, without /v1, or with a trailing slash."""

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

ALIASED = frozenset(
    {"chat", "completions", "models", "responses", "messages", "embeddings", "speculation"}
)
"""First parts of paths below /v1."""


class Aliases:
    """Strips ``root``, a proxy's path, and trailing slashes from paths; adds /v1 if missing."""

    def __init__(self, app: ASGIApp, root: str) -> None:
        self.app, self.root = app, root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path: str = scope["path"]
            if self.root and path == self.root:  # relative links of the page need the slash
                await RedirectResponse(f"{self.root}/")(scope, receive, send)
                return
            if self.root and path.startswith(f"{self.root}/"):
                path = path.removeprefix(self.root)
            path = path.rstrip("/") or "/"
            if path.removeprefix("/").partition("/")[0] in ALIASED:
                path = f"/v1{path}"
            scope = {**scope, "path": path, "raw_path": path.encode("utf-8", "surrogateescape")}
        await self.app(scope, receive, send)
