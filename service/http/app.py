"""The HTTP application. `create_app` makes everything; nothing here is global and nothing knows Ray."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict
from functools import partial
from importlib import metadata
from importlib.resources.abc import Traversable
from typing import Any, Final
from uuid import uuid4

import orjson
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from service.errors import BadRequest, NotReady, ServiceError
from service.http.backend import Backend, Readiness
from service.http.body import read_request
from service.http.dialects.chat import Chat
from service.http.dialects.completions import Completions
from service.http.dialects.dialect import Dialect
from service.http.dialects.messages.dialect import Messages
from service.http.dialects.responses.dialect import Responses
from service.http.edge import HANDLERS, Edge
from service.http.envelope import error_response
from service.http.exchange import answer
from service.http.live import Live
from service.http.names import find_model
from service.http.openapi import LEAST_DEADLINE_S, openapi_document
from service.http.page import Page
from service.http.plan import Headers, engine_messages, make_plan, prompt_of
from service.http.schema import MOST_LABEL, DetokenizeRequest, ProfileRequest, TokenizeRequest
from service.http.settings import HttpSettings
from service.http.small import SmallCalls
from service.http.validate import validate
from service.types import ModelCard

CHAT: Final = Chat()
COMPLETIONS: Final = Completions()
RESPONSES: Final = Responses()
MESSAGES: Final = Messages()
READ: Final = ["GET", "HEAD"]
"""What load balancers and probes ask: the head of what GET answers. Not of a stream, which has no end."""


def create_app(
    backend: Backend, settings: HttpSettings, page: Traversable | None = None, *, aliases: Sequence[str] = ()
) -> FastAPI:
    """The service's ASGI application over `backend`. `page`: the folder of the browser page, where there is one.
    `aliases`: globs of names that mean the model, too."""
    version = _version()
    app = FastAPI(
        title="glm5-serve",
        version=version,
        docs_url=None,
        openapi_url=None,
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers=HANDLERS,
    )
    app.add_middleware(Edge)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-glm-pool", "x-glm-queue-ms", "x-glm-ignored", "retry-after"],
        )
    document = openapi_document(settings, version)
    app.openapi = lambda: document  # type: ignore[method-assign]
    faces = _Faces(backend, settings, document, tuple(aliases), created=int(time.time()))
    app.add_api_route("/v1/chat/completions", faces.chat, methods=["POST"])
    app.add_api_route("/v1/completions", faces.completions, methods=["POST"])
    app.add_api_route("/v1/responses", faces.responses, methods=["POST"])
    app.add_api_route("/v1/messages", faces.messages, methods=["POST"])
    app.add_api_route("/v1/messages/count_tokens", faces.count_tokens, methods=["POST"])
    app.add_api_route("/v1/models", faces.models, methods=READ)
    app.add_api_route("/v1/models/{model:path}", faces.model, methods=READ)
    app.add_api_route("/tokenize", faces.tokenize, methods=["POST"])
    app.add_api_route("/detokenize", faces.detokenize, methods=["POST"])
    app.add_api_route("/profile", faces.profile, methods=["POST"])
    app.add_api_route("/health", faces.health, methods=READ)
    app.add_api_route("/ready", faces.ready, methods=READ)
    app.add_api_route("/version", faces.version, methods=READ)
    app.add_api_route("/metrics", faces.metrics, methods=READ)
    app.add_api_route("/v1/service/live", faces.live, methods=["GET"])
    if page is not None and settings.page:
        Page(page).add_to(app)
    app.add_api_route("/openapi.json", faces.openapi, methods=READ, include_in_schema=False)
    # What KubeRay asks of a Serve node: Serve's own proxy, which would answer, does not run.
    app.add_api_route("/-/healthz", faces.serve_health, methods=READ, include_in_schema=False)
    app.add_api_route("/-/routes", faces.serve_routes, methods=READ, include_in_schema=False)
    return app


class _Faces:
    """The endpoints."""

    def __init__(
        self,
        backend: Backend,
        settings: HttpSettings,
        document: dict[str, Any],
        aliases: tuple[str, ...],
        *,
        created: int,
    ) -> None:
        self._aliases = aliases
        self._backend = backend
        self._settings = settings
        self._version = document["info"]["version"]
        self._document = orjson.dumps(document)
        self._live = Live(backend)
        self._created = created
        self._small_calls = SmallCalls(backend, settings)

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, CHAT)

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, COMPLETIONS)

    async def responses(self, request: Request) -> Response:
        return await self._generate(request, RESPONSES)

    async def messages(self, request: Request) -> Response:
        return await self._generate(request, MESSAGES)

    async def count_tokens(self, request: Request) -> Response:
        self._backend.authorize(_credential(request))
        reading = await read_request(request, self._settings, MESSAGES.read_to_count)
        self._known(reading.asked.model)
        body = await self._small(request, self._backend.tokenize, prompt_of(reading.asked, reading.raw))
        return _json(orjson.dumps({"input_tokens": orjson.loads(body)["count"]}))

    async def _generate(self, request: Request, dialect: Dialect) -> Response:
        headers = _headers(request)
        self._backend.authorize(headers.credential)
        reading = await read_request(request, self._settings, dialect.read)
        try:
            plan = make_plan(
                reading.asked,
                reading.raw,
                id=f"{dialect.prefix}{uuid4().hex}",
                headers=headers,
                settings=self._settings,
                cards=self._backend.models(),
                honours=self._backend.honours(),
                ignored=reading.ignored,
                soft=reading.soft,
                client=reading.client,
                show_reasoning=reading.show_reasoning,
                aliases=self._aliases,
            )
        except ServiceError as error:
            raise dialect.explain(error) from None
        return answer(self._backend, self._settings, plan, dialect)

    async def tokenize(self, request: Request) -> Response:
        self._backend.authorize(_credential(request))
        asked, raw = await read_request(request, self._settings, lambda raw: (validate(TokenizeRequest, raw), raw))
        self._known(asked.model)
        body: dict[str, object] = {"prompt": asked.prompt}
        if asked.messages is not None:
            body = {"messages": engine_messages(asked.messages)}
        for name in ("tools", "chat_template_kwargs", "add_generation_prompt", "add_special_tokens"):
            if raw.get(name) is not None:
                body[name] = raw[name]
        return _json(await self._small(request, self._backend.tokenize, body))

    async def detokenize(self, request: Request) -> Response:
        self._backend.authorize(_credential(request))
        asked = await read_request(request, self._settings, partial(validate, DetokenizeRequest))
        self._known(asked.model)
        for card in self._backend.models()[:1]:
            if max(asked.tokens, default=0) >= card.vocab_size:
                raise BadRequest(
                    f"tokens: {max(asked.tokens)} is not in the vocabulary of {card.vocab_size}", param="tokens"
                )
        return _json(await self._small(request, self._backend.detokenize, {"tokens": asked.tokens}))

    async def _small(
        self, request: Request, call: Callable[[bytes], Coroutine[Any, Any, bytes]], asked: dict[str, Any]
    ) -> bytes:
        headers, body = _headers(request), orjson.dumps(asked)
        work = call(body)
        return await self._small_calls.run(request, headers.credential, len(body), work, headers.deadline_s)

    async def profile(self, request: Request) -> Response:
        self._operator(request)
        asked = await read_request(request, self._settings, partial(validate, ProfileRequest))
        return _json(await self._backend.profile(asked.pool, orjson.dumps({"seconds": asked.seconds})))

    async def models(self, request: Request) -> Response:
        self._backend.authorize(_credential(request))
        cards = [self._describe(card) for card in self._backend.models()]
        return _json(orjson.dumps({"object": "list", "data": cards}))

    async def model(self, request: Request) -> Response:
        self._backend.authorize(_credential(request))
        name = request.path_params["model"]
        return _json(orjson.dumps(self._describe(self._find(name)) | {"id": name}))

    async def health(self, request: Request) -> Response:
        return _json(b'{"status":"ok"}')

    async def serve_health(self, request: Request) -> Response:
        return Response(b"success", media_type="text/plain")

    async def serve_routes(self, request: Request) -> Response:
        return _json(b'{"/":"glm5"}')

    async def ready(self, request: Request) -> Response:
        now = self._backend.readiness()
        beside = {"ready": now.ready, "pools": {name: asdict(pool) for name, pool in now.pools.items()}}
        if now.ready:
            return _json(orjson.dumps(beside))
        return error_response(_not_ready(now), request.scope, beside=beside)

    async def version(self, request: Request) -> Response:
        return _json(orjson.dumps({"version": self._version}))

    async def metrics(self, request: Request) -> Response:
        if not self._settings.open_metrics:
            self._operator(request)
        text = await self._backend.metrics()
        return Response(text, media_type="text/plain; version=0.0.4")

    async def live(self, request: Request) -> Response:
        self._operator(request)
        return self._live.stream()

    async def openapi(self, request: Request) -> Response:
        self._operator(request)
        return _json(self._document)

    def _operator(self, request: Request) -> None:
        self._backend.authorize(_credential(request), operator=True)

    def _known(self, name: str | None) -> None:
        if name is not None and self._backend.models():
            self._find(name)

    def _find(self, name: str) -> ModelCard:
        return find_model(name, self._backend.models(), self._aliases)

    def _describe(self, card: ModelCard) -> dict[str, object]:
        return {
            "id": card.name,
            "object": "model",
            "created": self._created,
            "owned_by": "glm5-serve",
            "engine": card.engine,
            "architecture": card.architecture,
            "max_model_len": card.context_tokens,
            "vocab_size": card.vocab_size,
            "parameters": card.parameters,
            "size_bytes": card.bytes,
            "quantisation": card.quantisation,
        }


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _not_ready(now: Readiness) -> NotReady:
    waits = [f"{name}: {pool.phase} {pool.detail}".strip() for name, pool in now.pools.items()]
    etas = [pool.eta_s for pool in now.pools.values() if pool.eta_s is not None]
    return NotReady("; ".join(waits) or "nothing is loaded yet", retry_after_s=min(etas, default=None))


def _credential(request: Request) -> str | None:
    """Of the header that OpenAI's clients send, or of Anthropic's."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    bearer = key.strip() if scheme.lower() == "bearer" else ""
    return bearer or request.headers.get("x-api-key", "").strip() or None


def _headers(request: Request) -> Headers:
    mode = request.headers.get("x-glm-mode")
    if mode is not None and mode not in ("latency", "throughput"):
        raise BadRequest("the header x-glm-mode must be latency or throughput", param="x-glm-mode")
    wait = request.headers.get("x-request-timeout")
    session = request.headers.get("x-session-id", "")
    if len(session) > MOST_LABEL:
        raise BadRequest(f"the header x-session-id may have at most {MOST_LABEL} characters", param="x-session-id")
    return Headers(
        credential=_credential(request),
        mode=mode,  # type: ignore[arg-type]
        deadline_s=None if wait is None else _seconds(wait),
        session=session,
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not LEAST_DEADLINE_S <= seconds < math.inf:
        raise BadRequest(
            f"the header x-request-timeout must be a number of seconds, at least {LEAST_DEADLINE_S}",
            param="x-request-timeout",
        )
    return seconds


def _version() -> str:
    try:
        return metadata.version("glm5-serve")
    except metadata.PackageNotFoundError:  # run from a checkout that was not installed
        return "0+unknown"
