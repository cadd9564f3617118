"""From bytes on the wire to one JSON object, within bounds, or BadRequest / BodyTooLarge."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request

from service.errors import BadRequest, BodyTooLarge
from service.http.settings import HttpSettings

# Strings whole (possessive, closing quote optional: linear on any input), else one bracket.
_STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', re.DOTALL)


async def read_json(request: Request, settings: HttpSettings) -> dict[str, Any]:
    """The request's body as an object. Raises ClientDisconnect when the client goes away before its end."""
    _check_headers(request, settings)
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            body = await _read(request, settings.max_body_bytes)
    except TimeoutError:
        raise BadRequest(f"the request body did not arrive within {settings.body_timeout_s:g} s") from None
    return parse_object(body, settings.max_json_depth)


def parse_object(body: bytes, max_depth: int) -> dict[str, Any]:
    """Strict JSON: UTF-8, finite numbers, no lone surrogates, no duplicate keys, at most `max_depth` levels."""
    if not body.strip():
        raise BadRequest("the request body is empty; a JSON object is expected")
    if _depth(body) > max_depth:
        raise BadRequest(f"the request body is nested deeper than {max_depth} levels")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the request body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadRequest("the request body must be a JSON object")
    # orjson keeps the last of two equal keys without a word; only the standard parser can be asked.
    json.loads(body, object_pairs_hook=_unique, parse_int=str, parse_float=str)
    return value


def _check_headers(request: Request, settings: HttpSettings) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise BadRequest(f"Content-Type must be application/json, not {kind or 'absent'!r}")
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise BadRequest(f"Content-Encoding {encoding!r} is not supported; send the body as it is")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > settings.max_body_bytes:
        raise _too_large(settings.max_body_bytes, f"{length[:20]} bytes")


async def _read(request: Request, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit, "more")
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(limit: int, got: str) -> BodyTooLarge:
    return BodyTooLarge(f"the request body may have at most {limit} bytes; this one has {got}")


def _depth(body: bytes) -> int:
    depth = deepest = 0
    for match in _STRING_OR_BRACKET.finditer(body):
        first = body[match.start()]
        if first in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif first in b"]}":
            depth -= 1
    return deepest


def _unique(pairs: list[tuple[str, Any]]) -> None:
    seen = set()
    for name, _ in pairs:
        if name in seen:
            raise BadRequest(f"the key {name[:64]!r} appears twice in one JSON object", param=name[:64])
        seen.add(name)
