"""A delta as bytes between processes. Pure.

Nearly all of them are a piece of text and a few tokens:
    TEXT u8 | output u16 | text (UTF-8, the rest)
Any other:
    REST u8 | JSON list of the fields
"""

from __future__ import annotations

import base64
import struct
from typing import Any

import orjson

from service.types import CallPart, Delta, TokenLogprob

_HEAD = struct.Struct("<BH")
_TEXT, _REST = 0, 1
_MOST = 0xFFFF


def pack(delta: Delta) -> bytes:
    output = delta.output_tokens
    if 0 <= output <= _MOST and not (
        delta.reasoning
        or delta.calls
        or delta.logprobs
        or delta.finish
        or delta.prompt_tokens
        or delta.cached_tokens
        or delta.reasoning_tokens
        or delta.drafted
        or delta.accepted
    ):
        return _HEAD.pack(_TEXT, output) + delta.text.encode()
    fields = [
        delta.text,
        delta.reasoning,
        [[part.index, part.id, part.name, part.arguments] for part in delta.calls],
        [_token(token) for token in delta.logprobs],
        delta.finish,
        output,
        delta.prompt_tokens,
        delta.cached_tokens,
        delta.reasoning_tokens,
        delta.drafted,
        delta.accepted,
    ]
    return b"\x01" + orjson.dumps(fields)


def unpack(data: bytes) -> Delta:
    """Raises ValueError for anything that `pack` did not write."""
    if not data:
        raise ValueError("a delta of no bytes")
    if data[0] == _TEXT and len(data) >= _HEAD.size:
        return Delta(data[_HEAD.size :].decode(), output_tokens=_HEAD.unpack_from(data)[1])
    if data[0] != _REST:
        raise ValueError(f"a delta of an unknown kind, {data[0]}")
    try:
        text, reasoning, calls, logprobs, finish, *counts = orjson.loads(memoryview(data)[1:])
        parts = tuple(CallPart(*part) for part in calls)
        return Delta(text, reasoning, parts, tuple(_token_of(*token) for token in logprobs), finish, *counts)
    except TypeError as wrong:
        raise ValueError("a delta whose fields are not as they should be") from wrong


def _token(token: TokenLogprob) -> list[Any]:
    data = None if token.bytes is None else base64.b64encode(token.bytes).decode()
    return [token.token, token.logprob, data, [_token(top) for top in token.top]]


def _token_of(token: str, logprob: float | None, data: str | None, top: list[list[Any]]) -> TokenLogprob:
    known = None if data is None else base64.b64decode(data)
    return TokenLogprob(token, logprob, known, tuple(_token_of(*each) for each in top))
