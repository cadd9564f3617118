"""Errors as OpenAI's envelope. The only place where an error becomes bytes."""

from __future__ import annotations

import math
from typing import Any

import orjson

from service.errors import ServiceError


def envelope(error: ServiceError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def error_body(error: ServiceError) -> bytes:
    return orjson.dumps(envelope(error))


def error_event(error: ServiceError) -> bytes:
    """The last thing in a stream that failed; no `[DONE]` follows it."""
    return b"event: error\ndata: " + error_body(error) + b"\n\n"


def error_headers(error: ServiceError) -> dict[str, str]:
    """Retry-After in whole seconds (at least 1), and retry-after-ms, which OpenAI's SDKs prefer."""
    headers = {"content-type": "application/json"}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
        headers["retry-after-ms"] = str(max(1, math.ceil(error.retry_after_s * 1000)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers
