"""From bytes on the wire to one JSON object, within bounds, or BadRequest / BodyTooLarge."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request

from service.errors import BadRequest, BodyTooLarge
from service.http.settings import HttpSettings

# Possessive, so linear; applied to valid JSON only.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_REST = bytes(set(range(256)) - set(b"[]{}"))
_LARGE = 256 * 1024
_MOST_KEYS = 4096  # far above any use; half a million wrong keys would cost 5 s of error reports


T = TypeVar("T")


async def read_request(request: Request, settings: HttpSettings, read: Callable[[dict[str, Any]], T]) -> T:
    """The request's body, as `read` makes it of the JSON object. Raises BadRequest, BodyTooLarge, and ClientDisconnect
    when the client goes away before its end."""
    _check_headers(request, settings)
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            body = await _read(request, settings.max_body_bytes)
    except TimeoutError:
        raise BadRequest(f"the request body did not arrive within {settings.body_timeout_s:g} s") from None
    if len(body) > _LARGE:  # up to seconds of work: other requests go on meanwhile
        return await asyncio.to_thread(_parse, body, settings, read)
    return _parse(body, settings, read)


def _parse(body: bytes, settings: HttpSettings, read: Callable[[dict[str, Any]], T]) -> T:
    return read(parse_object(body, settings.max_json_depth))


def parse_object(body: bytes, max_depth: int) -> dict[str, Any]:
    """Strict JSON: UTF-8, finite numbers, no lone surrogates, no duplicate keys, at most `max_depth` levels."""
    if not body.strip():
        raise BadRequest("the request body is empty; a JSON object is expected")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if "depth limit" in str(error):
            raise _too_deep(max_depth) from None
        raise BadRequest(f"the request body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadRequest("the request body must be a JSON object")
    if _deeper(body, max_depth):
        raise _too_deep(max_depth)
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


def _too_deep(limit: int) -> BadRequest:
    return BadRequest(f"the request body is nested deeper than {limit} levels")


def _deeper(body: bytes, limit: int) -> bool:
    """Whether valid JSON has more than `limit` levels: what is left of its brackets if each round removes one."""
    brackets = _STRING.sub(b"", body).translate(_BRACKETS, _REST)
    for _ in range(limit):
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)


def _unique(pairs: list[tuple[str, Any]]) -> None:
    if len(pairs) > _MOST_KEYS:
        raise BadRequest(f"a JSON object in the request body has {len(pairs)} keys; at most {_MOST_KEYS} are allowed")
    seen = set()
    for name, _ in pairs:
        if name in seen:
            raise BadRequest(f"the key {name[:64]!r} appears twice in one JSON object", param=name[:64])
        seen.add(name)
