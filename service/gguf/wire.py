"""The bytes of a GGUF header, read with bounds.

Nothing here trusts a number from the file: a count is checked against the bytes that are left before anything is made
from it, every read is a plain `read` (a file cut while it is read gives an error; a mapping would give SIGBUS), and
the whole header may use at most `Limits.header_bytes`. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import BinaryIO

from service.gguf.errors import GgufError

Scalar = int | float | bool | str

STRING, ARRAY = 8, 9
FLOATS = frozenset({6, 12})
SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a header may use. GLM-5's own: 12 MB, 60 keys, 1,900 tensors, arrays of 318,000 merges, a 12 kB template."""

    header_bytes: int = 128 << 20
    keys: int = 4096
    tensors: int = 1 << 17
    string_bytes: int = 4 << 20
    array_items: int = 1 << 22
    name_bytes: int = 256


@dataclass(frozen=True, slots=True)
class GgufArray:
    """An array of the metadata, kept as bytes until asked for. `kind` is GGUF's number of the item type."""

    key: str
    kind: int
    length: int
    raw: bytes

    def values(self) -> list[Scalar]:
        """All items. Raises ValueError when a string in it is not UTF-8."""
        if self.kind != STRING:
            code = SCALARS[self.kind].format[-1]
            return list(struct.unpack(f"<{self.length}{code}", self.raw))
        found: list[Scalar] = []
        at, raw, unpack = 0, self.raw, _U64.unpack_from
        for index in range(self.length):
            end = at + 8 + int(unpack(raw, at)[0])
            try:
                found.append(raw[at + 8 : end].decode())
            except UnicodeDecodeError as error:
                raise ValueError(f"string {index} is not UTF-8 ({error.reason})") from None
            at = end
        return found


class Cursor:
    """A reader of `size` bytes that only goes forward and never past `limits`."""

    def __init__(self, stream: BinaryIO, size: int, path: object, limits: Limits) -> None:
        self._read = stream.read
        self.size = size
        self.path = path
        self.limits = limits
        self.at = 0

    def fail(self, where: str, problem: str) -> GgufError:
        return GgufError(self.path, where, problem)

    @property
    def left(self) -> int:
        return self.size - self.at

    def take(self, count: int, where: str) -> bytes:
        if count > self.left:
            raise self.fail(
                where, f"needs {count} bytes at offset {self.at}, the file ends at {self.size} (truncated?)"
            )
        if self.at + count > self.limits.header_bytes:
            raise self.fail(where, f"the header would pass {self.limits.header_bytes} bytes")
        data = self._read(count)
        if len(data) != count:
            raise self.fail(where, f"the file shrank while it was read, at offset {self.at + len(data)}")
        self.at += count
        return data

    def scalar(self, kind: int, where: str) -> int | float | bool:
        form = SCALARS[kind]
        value: int | float | bool = form.unpack(self.take(form.size, where))[0]
        return value

    def u32(self, where: str) -> int:
        return int(self.scalar(4, where))

    def u64(self, where: str) -> int:
        return int(self.scalar(10, where))

    def count(self, item_bytes: int, limit: int, where: str) -> int:
        """A count of things of at least `item_bytes` each: refused when they cannot fit in what is left."""
        value = self.u64(where)
        if value > limit or value * item_bytes > self.left:
            raise self.fail(where, f"claims {value} entries; {self.left} bytes are left and the limit is {limit}")
        return value

    def text(self, limit: int, where: str) -> str:
        length = self.u64(where)
        if length > limit:
            raise self.fail(where, f"a string of {length} bytes (limit {limit})")
        data = self.take(length, where)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self.fail(where, f"not UTF-8 ({error.reason} at byte {error.start})") from None

    def value(self, kind: int, key: str) -> Scalar | GgufArray:
        where = f"key {key}"
        if kind == STRING:
            return self.text(self.limits.string_bytes, where)
        if kind == ARRAY:
            return self._array(key, where)
        if kind not in SCALARS:
            raise self.fail(where, f"unknown value type {kind}")
        return self.scalar(kind, where)

    def _array(self, key: str, where: str) -> GgufArray:
        kind = self.u32(where)
        if kind == ARRAY:
            raise self.fail(where, "an array of arrays, which no known model file holds")
        if kind == STRING:
            return GgufArray(
                key, kind, length := self.count(8, self.limits.array_items, where), self._strings(length, where)
            )
        if kind not in SCALARS:
            raise self.fail(where, f"an array of unknown type {kind}")
        size = SCALARS[kind].size
        length = self.count(size, self.limits.array_items, where)
        return GgufArray(key, kind, length, self.take(length * size, where))

    def _strings(self, length: int, where: str) -> bytes:
        """`length` strings, each as 8 bytes of length and its bytes, unparsed."""
        parts: list[bytes] = []
        take, unpack, limit = self.take, _U64.unpack, self.limits.string_bytes
        for index in range(length):
            head = take(8, where)
            count = int(unpack(head)[0])
            if count > limit:
                raise self.fail(where, f"string {index} of {count} bytes (limit {limit})")
            parts.append(head)
            parts.append(take(count, where))
        return b"".join(parts)
