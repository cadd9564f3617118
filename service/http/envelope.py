"""Errors as the envelope that the client's SDK knows: OpenAI's, or Anthropic's under /v1/messages. The only place where
an error becomes a response."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, Final
from uuid import uuid4

import orjson
from starlette.responses import Response

from service.errors import ContextOverflow, ServiceError

log = logging.getLogger("glm5.http")

ANTHROPIC_PATH: Final = "/v1/messages"
REQUEST_ID: Final = "glm5.request_id"
"""Key of the ASGI scope under which a request's id stands."""

_ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def new_request_id() -> str:
    return f"req_{uuid4().hex}"


def request_id(scope: Mapping[str, Any]) -> str:
    return str(scope.get(REQUEST_ID, ""))


def envelope(error: ServiceError) -> dict[str, Any]:
    """OpenAI's."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def anthropic_envelope(error: ServiceError, request_id: str) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = error.message
    if isinstance(error, ContextOverflow):  # agents shorten their history when they read these words
        message = f"prompt is too long: {message}"
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def error_response(
    error: ServiceError,
    scope: Mapping[str, Any],
    *,
    beside: dict[str, Any] | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    """`beside`: keys next to `error`. Retry-After comes in whole seconds (at least 1) and as retry-after-ms, which
    OpenAI's SDKs prefer."""
    headers = dict(headers or {})
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
        headers["retry-after-ms"] = str(max(1, math.ceil(error.retry_after_s * 1000)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if str(scope["path"]).startswith(ANTHROPIC_PATH):
        body = anthropic_envelope(error, request_id(scope))
    else:
        body = envelope(error)
    return Response(
        orjson.dumps(body | (beside or {})), status_code=error.status, headers=headers, media_type="application/json"
    )


def error_event(error: ServiceError) -> bytes:
    """The last thing in a stream that failed; no `[DONE]` follows it."""
    return b"event: error\ndata: " + orjson.dumps(envelope(error)) + b"\n\n"


def as_service_error(error: BaseException) -> ServiceError:
    """Ours as it is. Anything else is a bug: logged, and shown without its insides."""
    if isinstance(error, ServiceError):
        return error
    log.error("a request failed by a fault of ours", exc_info=error)
    return ServiceError("the service failed at this request by a fault of its own")
