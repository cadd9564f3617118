"""Text that arrives in pieces cut anywhere, handed on in pieces that are whole characters."""

from __future__ import annotations

import codecs
import json
import re
from typing import Any

import orjson

from service.errors import EngineFailed

_SURROGATE = re.compile("[\ud800-\udfff]")
_LONE = re.compile("[\ud800-\udbff\udc00-\udc7f]")


def parse_chunk(data: bytes) -> dict[str, Any]:
    """One JSON object from an engine, whose strings may be cut inside a character: raw bytes come as U+DC80..U+DCFF,
    halves of an escaped pair as themselves. `Joiner` mends both. Raises EngineFailed."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        try:
            value = json.loads(data.decode("utf-8", "surrogateescape"))
        except ValueError:
            raise EngineFailed("the engine sent something that is not JSON") from None
    if not isinstance(value, dict):
        raise EngineFailed("the engine sent JSON that is not an object")
    return value


class Joiner:
    """`push` pieces, get text without half characters; `flush` at the end: what never became whole is U+FFFD."""

    __slots__ = ("_decoder", "_high", "_pending")

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._high = ""
        self._pending = False

    def push(self, piece: str) -> str:
        if not self._pending and (piece.isascii() or not _SURROGATE.search(piece)):
            return piece
        text = (self._high + piece).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        self._high = ""
        if "\ud800" <= text[-1:] <= "\udbff":
            text, self._high = text[:-1], text[-1]
        whole = self._decoder.decode(_LONE.sub("\ufffd", text).encode("utf-8", "surrogateescape"))
        self._pending = bool(self._high or self._decoder.getstate()[0])
        return whole

    def flush(self) -> str:
        if not self._pending:
            return ""
        rest = self._decoder.decode(b"", True) + ("\ufffd" if self._high else "")
        self._high, self._pending = "", False
        self._decoder.reset()
        return rest
