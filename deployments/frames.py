"""Bytes between ingress and replica. Ray pickles bytes for free; objects would cost a quarter of the throughput.

A message of the handle is one frame, or several joined (a replica that has many deltas ready sends them at once):
    length u32 | kind u8 | data
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import orjson

from service.errors import ServiceError
from service.link import delta as wire
from service.types import Delta, EngineRequest

_HEAD = struct.Struct("<IB")
_DELTA, _ERROR, _BYTES = 0, 1, 2


def pack_delta(delta: Delta) -> bytes:
    data = wire.pack(delta)
    return _HEAD.pack(len(data), _DELTA) + data


def pack_error(error: ServiceError) -> bytes:
    data = orjson.dumps(error.to_wire())
    return _HEAD.pack(len(data), _ERROR) + data


def pack_bytes(data: bytes) -> bytes:
    """The answer of a call other than `generate`."""
    return _HEAD.pack(len(data), _BYTES) + data


def unpack(message: bytes) -> Iterator[Delta | ServiceError | bytes]:
    """The frames of one message, in order."""
    at = 0
    while at < len(message):
        length, kind = _HEAD.unpack_from(message, at)
        at += _HEAD.size
        data = message[at : at + length]
        at += length
        if kind == _DELTA:
            yield wire.unpack(data)
        else:
            yield data if kind == _BYTES else ServiceError.from_wire(orjson.loads(data))


def pack_request(request: EngineRequest) -> bytes:
    head = orjson.dumps([request.id, request.endpoint, request.tier, request.timeout_s])
    return struct.pack("<I", len(head)) + head + request.body


def unpack_request(message: bytes) -> EngineRequest:
    (length,) = struct.unpack_from("<I", message)
    id, endpoint, tier, timeout_s = orjson.loads(message[4 : 4 + length])
    return EngineRequest(id, endpoint, message[4 + length :], tier, timeout_s)
