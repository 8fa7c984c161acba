"""Other ways to write a path: below a proxy's, or without /v1, as other servers have it."""

from starlette.types import ASGIApp, Receive, Scope, Send

ALIASED = frozenset(
    {"chat", "completions", "models", "responses", "messages", "embeddings", "speculation"}
)
"""First parts of paths below /v1."""


class Aliases:
    """Takes ``root`` off paths, the path below which a proxy serves, and gives others their /v1."""

    def __init__(self, app: ASGIApp, root: str) -> None:
        self.app, self.root = app, root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path: str = scope["path"]
            if self.root and path.startswith(f"{self.root}/"):
                path = path.removeprefix(self.root)
            if path.split("/", 2)[1] in ALIASED:
                path = f"/v1{path}"
            raw = path.encode("utf-8", "surrogateescape")
            scope = {**scope, "path": path, "raw_path": raw, "root_path": self.root}
        await self.app(scope, receive, send)
