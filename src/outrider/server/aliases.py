"""Other ways to write a path: below a proxy's, without /v1, or with a slash at its end."""

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

ALIASED = frozenset(
    {"chat", "completions", "models", "responses", "messages", "embeddings", "speculation"}
)
"""First parts of paths below /v1."""


class Aliases:
    """Takes ``root``, the path below which a proxy serves, and last slashes off paths; adds /v1."""

    def __init__(self, app: ASGIApp, root: str) -> None:
        self.app, self.root = app, root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path: str = scope["path"]
            if self.root and path == self.root:  # the page's own paths begin at the slash
                await RedirectResponse(f"{self.root}/")(scope, receive, send)
                return
            if self.root and path.startswith(f"{self.root}/"):
                path = path.removeprefix(self.root)
            path = path.rstrip("/") or "/"
            if path.removeprefix("/").partition("/")[0] in ALIASED:
                path = f"/v1{path}"
            scope = {**scope, "path": path, "raw_path": path.encode("utf-8", "surrogateescape")}
        await self.app(scope, receive, send)
