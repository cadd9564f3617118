"""Serve's proxy answers in plain text when no ingress can be reached: this puts OpenAI's error envelope around it."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.middleware import Middleware

from service.errors import EngineFailed, NotReady, ServiceError

IMPORT_PATH = "deployments.proxy_errors.middlewares"


def middlewares() -> list[Middleware]:
    """Serve calls this in each proxy process (RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH)."""
    return [Middleware(Envelope)]


class Envelope:
    """Replaces error responses that are not JSON or have no body; all else passes untouched, chunk by chunk."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope.get("path", "").startswith("/-/"):
            await self._app(scope, receive, send)
            return
        replacing = False
        held: Any = None
        """The head of an error in JSON: an ingress that dies now would leave it without a body."""

        async def watch(message: Any) -> None:
            nonlocal replacing, held
            if message["type"] == "http.response.start":
                kind = dict(message["headers"]).get(b"content-type", b"")
                wrong = message["status"] >= 400 and b"event-stream" not in kind
                replacing = wrong and b"json" not in kind
                if replacing:
                    await _send_envelope(send, message["status"])
                    return
                # The proxy puts the same id on by itself.
                message["headers"] = [h for h in message["headers"] if h[0] != b"x-request-id"]
                if wrong:
                    held = message
                    return
            elif held is not None:
                if not message.get("body"):
                    return
                head, held = held, None
                await send(head)
            if not replacing:
                await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            if held is not None:
                await _send_envelope(send, held["status"])


async def _send_envelope(send: Any, status: int) -> None:
    error: ServiceError
    # Our own 404s are JSON and pass through: the proxy's means that the application is not there (yet, or any more).
    if status in (404, 502, 503, 504):
        error = NotReady("the service has no front process that can answer yet", retry_after_s=2.0)
    else:
        error = EngineFailed("the front process was lost while it held this request")
    body = orjson.dumps({"error": {"message": error.message, "type": error.type, "param": None, "code": error.code}})
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if error.retry_after_s:
        headers.append((b"retry-after", str(int(error.retry_after_s)).encode()))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
