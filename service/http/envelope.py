"""Errors as OpenAI's envelope. The only place where an error becomes bytes."""

from __future__ import annotations

import logging
import math
from typing import Any

import orjson
from starlette.responses import Response

from service.errors import ServiceError

log = logging.getLogger("glm5.http")


def envelope(error: ServiceError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def error_response(
    error: ServiceError, *, beside: dict[str, Any] | None = None, headers: dict[str, str] | None = None
) -> Response:
    """`beside`: keys next to `error`. Retry-After comes in whole seconds (at least 1) and as retry-after-ms, which
    OpenAI's SDKs prefer."""
    headers = dict(headers or {})
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
        headers["retry-after-ms"] = str(max(1, math.ceil(error.retry_after_s * 1000)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    body = orjson.dumps(envelope(error) | (beside or {}))
    return Response(body, status_code=error.status, headers=headers, media_type="application/json")


def error_event(error: ServiceError) -> bytes:
    """The last thing in a stream that failed; no `[DONE]` follows it."""
    return b"event: error\ndata: " + orjson.dumps(envelope(error)) + b"\n\n"


def as_service_error(error: BaseException) -> ServiceError:
    """Ours as it is. Anything else is a bug: logged, and shown without its insides."""
    if isinstance(error, ServiceError):
        return error
    log.error("a request failed by a fault of ours", exc_info=error)
    return ServiceError("the service failed at this request by a fault of its own")
