"""The paths of the server."""

import contextlib
import logging
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import (
    FileResponse,
    JSONResponse,
    PlainTextResponse,
    Response,
)  # fmt: skip
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from .. import __version__
from ..async_llm import AsyncLLM
from ..checkpoints.folder_tokenizer import config_of
from ..frontend.instruct import is_instruct
from . import protocol
from .access import Access
from .aliases import Aliases
from .answering import answered, unless_gone
from .batch import Batch, BatchRequest
from .bodies import LONG_BODY, BodyRoute
from .chat import Chat
from .completions import Completion
from .errors import RESPONSES, Refusal, install, response
from .generate import Generate, GenerateRequest
from .hosts import from_this_machine
from .messages.body import MessagesRequest, Prompt
from .messages.call import Messages
from .responses.body import ResponsesRequest
from .responses.call import Responses, cancelled, chat_of, forgotten
from .score import Score, ScoreRequest, ScoringRequest
from .security import Gate
from .service import Service
from .settings import Settings
from .speculation import change, load, state
from .tokens import Tokens, TokensRequest, rendered
from .tools import check_tools, choice_of
from .traces import Tracer

T = TypeVar("T")
logger = logging.getLogger("outrider")
PLAYGROUND = Path(__file__).parent / "playground"
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Frame-Options": "DENY",
}
"""Headers of every page: it loads nothing from other hosts, and no page may frame it."""


def create_app(llm: AsyncLLM, settings: Settings) -> FastAPI:
    """Return the app that serves an engine; it starts and ends the engine with itself."""
    endpoint = settings.otlp_traces_endpoint
    tracer = Tracer(endpoint) if endpoint is not None else None

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        llm.launch()
        yield
        llm.shutdown()
        if tracer is not None:
            tracer.provider.shutdown()  # sends the rest
        if service.recorder is not None:
            service.recorder.close()

    app = FastAPI(
        title="Outrider", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None,
        responses=RESPONSES,
        servers=[{"url": settings.root_path}] if settings.root_path else None,
    )  # fmt: skip
    service = Service(llm, settings)
    app.state.service = service
    app.router.route_class = BodyRoute
    install(app)
    app.add_middleware(Gate, settings=settings)
    app.add_middleware(Access, failed=service.metrics.failed, tracer=tracer)
    app.add_middleware(Aliases, root=settings.root_path)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.allowed_origins, allow_methods=["*"],
            allow_headers=["*"], expose_headers=["x-request-id", "retry-after"],
        )  # fmt: skip
    _models(app, service)
    _tokens(app, service)
    _of_sglang(app, service)
    _others(app, service)
    _texts(app, service)
    _health(app, service)
    _speculation(app, service)
    _playground(app)
    return app


def _models(app: FastAPI, service: Service) -> None:
    created = int(time.time())
    chats = is_instruct(service.llm.inputs.folder, service.llm.inputs.codec)
    since = datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the served model under each of its names."""
        inputs = service.llm.inputs
        cards = [
            {
                "id": name, "object": "model", "created": created, "owned_by": "outrider",
                "root": str(inputs.folder), "parent": None, "max_model_len": inputs.max_model_len,
                # What the playground starts with, and what Anthropic's clients read.
                "chats": chats, "sampling": dict(service.settings.defaults),
                "type": "model", "display_name": name, "created_at": since, "lifecycle": "active",
            }
            for name in service.settings.names
        ]  # fmt: skip
        ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"], "has_more": False}
        return {"object": "list", "data": cards, **ends}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """Return the model of one name."""
        service.check_model(name)
        return next(card for card in (await models())["data"] if card["id"] == name)

    @app.post("/v1/embeddings", include_in_schema=False)
    async def embeddings() -> None:
        """Say that there are none, to a call with a body of any kind."""
        raise Refusal("this server generates text; it has no embeddings.", status=404)

    @app.post("/v1/completions", responses=STREAMED)
    async def completions(body: protocol.CompletionRequest, http: Request) -> Response:
        """Continue prompts."""
        return await answered(Completion(service, body, http), http)

    @app.post("/v1/chat/completions", responses=STREAMED)
    async def chat(body: protocol.ChatRequest, http: Request) -> Response:
        """Answer a conversation."""
        return await answered(Chat(service, body, http), http)

    @app.post("/v1/chat/completions/batch")
    async def batch(body: BatchRequest, http: Request) -> Response:
        """Answer several conversations."""
        return await Batch(service, body, http).answered()

    @app.post("/invocations", responses=STREAMED)
    async def invoke(body: protocol.Invocation, http: Request) -> Response:
        """Answer a conversation, or continue prompts, by SageMaker's path."""
        asked = body.asked()
        is_chat = isinstance(asked, protocol.ChatRequest)
        return await (chat if is_chat else completions)(asked, http)


def _tokens(app: FastAPI, service: Service) -> None:
    """Add vLLM's paths that render prompts and that continue token ids."""

    @app.post("/v1/completions/render")
    async def render(body: protocol.CompletionRequest, http: Request) -> list[dict[str, Any]]:
        """Return the token ids of prompts, and the options."""
        return await rendered(Completion(service, body, http), http)

    @app.post("/v1/chat/completions/render")
    async def render_chat(body: protocol.ChatRequest, http: Request) -> dict[str, Any]:
        """Return the token ids of a conversation, and the options."""
        return (await rendered(Chat(service, body, http), http))[0]

    @app.post("/inference/v1/generate", responses=STREAMED)
    async def generate(body: TokensRequest, http: Request) -> Response:
        """Go on behind token ids, with token ids."""
        return await answered(Tokens(service, body, http), http)


def _of_sglang(app: FastAPI, service: Service) -> None:
    @app.post("/generate", responses=STREAMED)
    async def generate(body: GenerateRequest, http: Request) -> Response:
        """Go on behind texts or token ids, as SGLang does."""
        return await answered(Generate(service, body, http), http)

    @app.post("/v1/score")
    async def score(body: ScoreRequest, http: Request) -> Response:
        """Return how likely labels are behind items, as SGLang does."""
        return await answered(Score(service, body, http), http)

    @app.post("/generative_scoring")
    async def scoring(body: ScoringRequest, http: Request) -> Response:
        """Return how likely the first label is behind items, as vLLM does."""
        return await answered(Score(service, body, http), http)

    @app.get("/get_model_info", include_in_schema=False)
    @app.get("/model_info")
    async def model_info() -> dict[str, Any]:
        """Return what SGLang's clients ask about the model."""
        inputs = service.llm.inputs
        path = str(inputs.folder)
        return {
            "model_path": path, "tokenizer_path": path, "is_generation": True,
            "served_model_name": service.name, "max_model_len": inputs.max_model_len,
        }  # fmt: skip


def _others(app: FastAPI, service: Service) -> None:
    """Add the paths of other APIs, whose calls are answered as chats."""

    @app.post("/v1/responses", responses=STREAMED)
    async def respond(body: ResponsesRequest, http: Request) -> Response:
        """Answer input items, as OpenAI's Responses API does."""
        return await answered(Responses(service, body, http), http)

    @app.post("/v1/responses/input_tokens")
    async def tokens_of_input(body: ResponsesRequest, http: Request) -> dict[str, Any]:
        """Return how many tokens the prompt of a response has."""
        chat = chat_of(body, service.responses, http.state.key)
        count = await num_prompt_tokens(chat, http)
        return {"object": "response.input_tokens", "input_tokens": count}

    @app.get("/v1/responses/{id}")
    async def kept(id: str, http: Request) -> Response:
        """Return a response that is kept."""
        if http.query_params.get("stream", "false") != "false":
            raise Refusal("a stored response cannot be streamed again; leave out stream.",
                          "stream")  # fmt: skip
        return JSONResponse(service.responses.get(id, http.state.key).answer)

    @app.delete("/v1/responses/{id}")
    async def forget(id: str, http: Request) -> dict[str, Any]:
        """Forget a response that is kept."""
        forgotten(service, id, http.state.key)
        return {"id": id, "object": "response", "deleted": True}

    @app.post("/v1/responses/{id}/cancel")
    async def cancel(id: str, http: Request) -> Response:
        """Cancel a response that runs."""
        return JSONResponse(cancelled(service, id, http.state.key))

    @app.post("/v1/messages", responses=STREAMED)
    async def message(body: MessagesRequest, http: Request) -> Response:
        """Answer messages, as Anthropic's Messages API does."""
        return await answered(Messages(service, body, http), http)

    @app.post("/v1/messages/count_tokens")
    async def count(body: Prompt, http: Request) -> dict[str, int]:
        """Return how many tokens the prompt of messages has."""
        return {"input_tokens": await num_prompt_tokens(body.chat(), http)}

    async def num_prompt_tokens(chat: protocol.ChatRequest, http: Request) -> int:
        """Return how many tokens the prompt of a chat has."""
        service.check_model(chat.model)
        tools = chat.tools or [] if choice_of(chat).how != "none" else []
        long = http.state.body_bytes >= LONG_BODY
        with contextlib.closing(service.queue.enter(1)):
            encoding = service.texts.chat_ids(chat.messages, tools, chat, long)
            ids, _ = await unless_gone(http, encoding)
        return len(ids)


def _texts(app: FastAPI, service: Service) -> None:
    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        """Return what transformers' configuration of the tokenizer would say."""
        inputs = service.llm.inputs
        codec = inputs.codec
        if codec is None:
            raise Refusal("this model has no tokenizer.", status=404)
        most = inputs.max_model_len
        return config_of(codec.special_tokens, codec.chat_template) | {"model_max_length": most}

    @app.post("/tokenize")
    async def tokenize(body: protocol.TokenizeRequest, http: Request) -> Response:
        """Return the token ids of a text or a conversation."""
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise Refusal("give either prompt or messages.", "prompt")
        check_tools(body.tools or [])
        long = http.state.body_bytes >= LONG_BODY
        with contextlib.closing(service.queue.enter(1)):
            if body.prompt is None:
                chat = service.texts.chat_ids(body.messages or [], body.tools or [], body, long)
                ids, _ = await unless_gone(http, chat)
            else:
                text = service.texts.ids(body.prompt, body.add_special_tokens)
                ids = await unless_gone(http, text)
        inputs, words = service.llm.inputs, None
        if body.return_token_strs:
            words = await service.texts.slow(lambda: [*map(inputs.outputs.piece, ids)])
        most = inputs.max_model_len
        return JSONResponse(
            {"count": len(ids), "max_model_len": most, "tokens": ids, "token_strs": words}
        )

    @app.post("/detokenize")
    async def detokenize(body: protocol.DetokenizeRequest) -> dict[str, Any]:
        """Return the text of token ids."""
        service.check_model(body.model)
        with contextlib.closing(service.queue.enter(1)):
            return {"prompt": await service.texts.decode(body.tokens)}


def _health(app: FastAPI, service: Service) -> None:
    @app.head("/health", include_in_schema=False)
    @app.get("/health", response_class=PlainTextResponse)
    async def health() -> Response:
        """Answer 200 while the server is alive or loads, 503 if the engine hangs or fails.

        The answer is empty unless calls are recorded.
        """
        trouble, recorder = service.llm.trouble, service.recorder
        if trouble is not None:
            return response(trouble, status=503)
        if recorder is not None:
            return JSONResponse({"recording": recorder.state()})
        return PlainTextResponse("")

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready")
    async def ready() -> Response:
        """Answer 200 when the engine has decoded and no shutdown has begun, else 503."""
        if service.draining:
            raise Refusal("the server is shutting down.", status=503)
        if service.llm.trouble is not None:
            return response(service.llm.trouble, status=503)
        if service.llm.ready is None:
            raise Refusal("the engine is starting.", status=503)
        return JSONResponse({"ready": True})

    @app.get("/ping", include_in_schema=False)
    @app.post("/ping", include_in_schema=False)
    async def ping() -> Response:
        """Answer as /health does, to what asks by SageMaker's path."""
        return await health()

    @app.get("/load")
    async def load_now() -> dict[str, int]:
        """Return how many requests are under way."""
        return {"server_load": service.metrics.under_way}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Return all metrics in Prometheus' text format."""
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        """Return counts and times of the last requests."""
        return service.stats.as_json()

    @app.get("/version")
    async def version() -> dict[str, str]:
        """Return Outrider's version."""
        return {"version": __version__}


def _speculation(app: FastAPI, service: Service) -> None:
    @app.get("/v1/speculation")
    async def get() -> dict[str, Any]:
        """Return the drafters, their figures, and the default drafter and draft length."""
        return state(service)

    @app.post("/v1/speculation")
    async def post(body: protocol.SpeculationChange, http: Request) -> dict[str, Any]:
        """Set drafter and draft length from the next step on, or load another drafter.

        Needs an API key or this machine.
        """
        peer = http.client.host if http.client else None
        if not service.settings.api_keys and not from_this_machine(http.headers, peer):
            raise Refusal("without API keys, only this machine may set speculation.", status=403)
        await (change if body.load is None else load)(service, body)
        return state(service)


class _PlaygroundPages(StaticFiles):
    """Serves the files of the playground with the headers of a page."""

    def file_response(self, *args: Any, **more: Any) -> Response:
        answer = super().file_response(*args, **more)
        answer.headers.update(PAGE_HEADERS)
        return answer


def _playground(app: FastAPI) -> None:
    """Serve the page at /."""

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(PLAYGROUND / "index.html", headers=PAGE_HEADERS)

    app.mount("/playground", _PlaygroundPages(directory=PLAYGROUND))
