"""Bytes between ingress and replica. Ray pickles bytes for free; objects would cost a quarter of the throughput.

A message of the handle is one frame, or several joined (a replica that has many chunks ready sends them at once):
    length u32 | kind u8 | output u32 | prompt u32 | cached u32 | drafted u32 | accepted u32 | data
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import orjson

from service.errors import ServiceError
from service.types import Chunk, EngineRequest

_HEAD = struct.Struct("<IBIIIII")
_CHUNK, _ERROR = 0, 1


def pack_chunk(chunk: Chunk) -> bytes:
    return (
        _HEAD.pack(
            len(chunk.data),
            _CHUNK,
            chunk.output_tokens,
            chunk.prompt_tokens,
            chunk.cached_tokens,
            chunk.drafted,
            chunk.accepted,
        )
        + chunk.data
    )


def pack_error(error: ServiceError) -> bytes:
    data = orjson.dumps(error.to_wire())
    return _HEAD.pack(len(data), _ERROR, 0, 0, 0, 0, 0) + data


def unpack(message: bytes) -> Iterator[Chunk | ServiceError]:
    """The frames of one message, in order."""
    at = 0
    while at < len(message):
        length, kind, *counts = _HEAD.unpack_from(message, at)
        at += _HEAD.size
        data = message[at : at + length]
        at += length
        yield Chunk(data, *counts) if kind == _CHUNK else ServiceError.from_wire(orjson.loads(data))


def pack_request(request: EngineRequest) -> bytes:
    head = orjson.dumps([request.id, request.endpoint, request.stream, request.tier, request.timeout_s])
    return struct.pack("<I", len(head)) + head + request.body


def unpack_request(message: bytes) -> EngineRequest:
    (length,) = struct.unpack_from("<I", message)
    id, endpoint, stream, tier, timeout_s = orjson.loads(message[4 : 4 + length])
    return EngineRequest(id, endpoint, message[4 + length :], stream, tier, timeout_s)
