"""What every request passes first and every response last. Raw ASGI: it stands in the way of each chunk."""

from __future__ import annotations

import re
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import BadRequest, MethodNotAllowed, NotFound, ServiceError
from service.http.envelope import ANTHROPIC_PATH, REQUEST_ID, as_service_error, error_response, new_request_id

_GOOD_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")


class Edge:
    """Gives every response an x-request-id (the client's own, if it is a sane one) and every stray exception the error
    envelope; after the first byte all it can do is to break the connection off."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _GOOD_ID.fullmatch(given) else new_request_id()
        scope[REQUEST_ID] = request_id
        ids = [(b"x-request-id", request_id.encode())]
        if scope["path"].startswith(ANTHROPIC_PATH):
            ids.append((b"request-id", request_id.encode()))
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", ()), *ids]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            return
        except Exception as error:
            if started:
                raise
            await error_response(as_service_error(error), scope)(scope, receive, send_with_id)


async def _service_error(request: Request, error: ServiceError) -> Response:
    return error_response(error, request.scope)


async def _http_exception(request: Request, error: HTTPException) -> Response:
    where = f"{request.method} {request.url.path[:128]}"
    found: ServiceError
    if error.status_code == 404:
        found = NotFound(f"there is no {where}; GET /openapi.json lists what there is")
    elif error.status_code == 405:
        found = MethodNotAllowed(f"{where} is not allowed; see the header Allow")
    else:
        found = BadRequest(str(error.detail))
    return error_response(found, request.scope, headers=dict(error.headers or {}))


async def _validation_error(request: Request, error: RequestValidationError) -> Response:
    return error_response(BadRequest(str(error)[:500]), request.scope)


HANDLERS: dict[Any, Any] = {
    ServiceError: _service_error,
    HTTPException: _http_exception,
    RequestValidationError: _validation_error,
}
