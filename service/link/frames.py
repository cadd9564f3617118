"""Frames of the connection between an ingress and a replica. Pure.

    length u32 | kind u8 | stream u32 | data (length bytes)

`stream` numbers the calls of one connection, from 1; 0 is the connection itself. Many frames travel in one write: what
a step of the engine gave to an ingress is one message of the socket.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import orjson

from service.errors import ServiceError
from service.types import EngineRequest

HEAD = struct.Struct("<IBI")


class Kind(IntEnum):
    """GENERATE, CALL and CANCEL go to the replica; DELTA, BYTES, ERROR and END come from it; BEAT goes both ways."""

    BEAT = 0
    GENERATE = 1
    CALL = 2
    CANCEL = 3
    DELTA = 4
    BYTES = 5
    ERROR = 6
    END = 7


@dataclass(frozen=True, slots=True)
class Frame:
    kind: int
    stream: int
    data: bytes


BEAT = HEAD.pack(0, Kind.BEAT, 0)


def pack(kind: Kind, stream: int, data: bytes = b"") -> bytes:
    return HEAD.pack(len(data), kind, stream) + data


class Splitter:
    """Bytes as they arrive, into frames. `most`: largest data of a frame, bytes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Whole frames, in order. Raises ValueError for a frame larger than allowed: the connection is of no use."""
        rest = self._rest
        rest += data
        at, end = 0, len(rest)
        try:
            while end - at >= HEAD.size:
                length, kind, stream = HEAD.unpack_from(rest, at)
                if length > self._most:
                    raise ValueError(f"a frame of {length} bytes; at most {self._most} are allowed")
                if end - at - HEAD.size < length:
                    break
                begin = at + HEAD.size
                at = begin + length
                yield Frame(kind, stream, bytes(rest[begin:at]))
        finally:
            del rest[:at]


def pack_request(request: EngineRequest) -> bytes:
    head = orjson.dumps([request.id, request.endpoint, request.tier, request.timeout_s])
    return struct.pack("<I", len(head)) + head + request.body


def unpack_request(data: bytes) -> EngineRequest:
    """Raises ValueError for anything that `pack_request` did not write."""
    try:
        (length,) = struct.unpack_from("<I", data)
        id, endpoint, tier, timeout_s = orjson.loads(data[4 : 4 + length])
    except (struct.error, TypeError) as wrong:
        raise ValueError("a request whose head is not as it should be") from wrong
    return EngineRequest(id, endpoint, data[4 + length :], tier, timeout_s)


def pack_call(method: str, body: bytes) -> bytes:
    """A call other than a generation."""
    return method.encode() + b"\0" + body


def unpack_call(data: bytes) -> tuple[str, bytes]:
    method, _, body = data.partition(b"\0")
    return method.decode(), body


def pack_error(error: ServiceError) -> bytes:
    return orjson.dumps(error.to_wire())


def unpack_error(data: bytes) -> ServiceError:
    return ServiceError.from_wire(orjson.loads(data))
