"""What a GGUF file says about itself: metadata and the list of tensors, of one file or of all parts of a split one.

    header = read_header(Path("GLM-5-UD-Q4_K_XL-00001-of-00010.gguf"))
    header.architecture                                   # "glm-dsa"
    header.integer("{arch}.block_count")                  # 79
    header.tensors["blk.3.ffn_gate_exps.weight"].shape    # (6144, 2048, 256): innermost first, ggml's order

Every failure is a GgufError that names the key or tensor; see wire.py for the bounds. No tensor data is read.
"""

from __future__ import annotations

import hashlib
import math
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from service.gguf.errors import GgufError
from service.gguf.wire import FLOATS, STRING, Cursor, GgufArray, Limits, Scalar

_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_MAX_DIMS = 4
_MAX_ELEMENTS = 1 << 50
_MIN_KEY_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor. `shape` is in ggml's order: innermost (contiguous) dimension first, so a weight that maps `columns`
    inputs to `rows` outputs is (columns, rows), and a stack of experts (columns, rows, experts).
    `file` indexes GgufHeader.files; `offset` counts from the start of that file; `bytes` is the size of the data."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    file: int
    offset: int
    bytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def columns(self) -> int:
        """Length of a row: what quantisation blocks run along."""
        return self.shape[0]

    @property
    def numpy_shape(self) -> tuple[int, ...]:
        """Outermost dimension first."""
        return self.shape[::-1]

    @property
    def row_bytes(self) -> int:
        block, size = GGML_QUANT_SIZES[self.type]
        return self.columns // block * size


@dataclass(frozen=True)
class GgufHeader:
    """A checked header. `metadata` is of the first file; `tensors` of all files, in file order.

    `identity`: SHA-256 (hex) over the header bytes and sizes of all files; equal for copies of the same files.
    """

    files: tuple[Path, ...]
    file_bytes: tuple[int, ...]
    version: int
    metadata: Mapping[str, Scalar | GgufArray]
    tensors: Mapping[str, TensorInfo]
    identity: str

    @property
    def path(self) -> Path:
        return self.files[0]

    @property
    def bytes(self) -> int:
        """Size of the file(s)."""
        return sum(self.file_bytes)

    @property
    def architecture(self) -> str:
        return self.text("general.architecture")

    @property
    def name(self) -> str:
        return self.text("general.name", self.path.stem)

    @property
    def chat_template(self) -> str | None:
        return self.text("tokenizer.chat_template", "") or None

    @cached_property
    def parameters(self) -> int:
        return sum(t.elements for t in self.tensors.values())

    @cached_property
    def bytes_by_type(self) -> dict[str, int]:
        """Tensor bytes per quantisation type, largest first."""
        found: dict[str, int] = {}
        for tensor in self.tensors.values():
            found[tensor.type.name] = found.get(tensor.type.name, 0) + tensor.bytes
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def quantisation(self) -> str:
        """The type that holds most bytes."""
        return next(iter(self.bytes_by_type))

    # -- metadata by kind. `{arch}` in a key stands for the architecture; without `default` a missing key is an error.

    def __contains__(self, key: str) -> bool:
        return self._key(key) in self.metadata

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._mismatch(key, "an integer", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._mismatch(key, "a finite number", value)
        return float(value)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._mismatch(key, "true or false", value)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._mismatch(key, "a string", value)
        return value

    def length(self, key: str) -> int:
        """Number of items of an array, without decoding it."""
        return self._array(key).length

    def texts(self, key: str) -> list[str]:
        array = self._array(key)
        if array.kind != STRING:
            raise self._mismatch(key, "an array of strings", array)
        try:
            values = array.values()
        except ValueError as error:
            raise GgufError(self.path, f"key {self._key(key)}", str(error)) from None
        return [str(v) for v in values]

    def integers(self, key: str) -> list[int]:
        array = self._array(key)
        if array.kind in FLOATS or array.kind == STRING:
            raise self._mismatch(key, "an array of integers", array)
        return [int(v) for v in array.values()]

    def numbers(self, key: str) -> list[float]:
        array = self._array(key)
        if array.kind == STRING:
            raise self._mismatch(key, "an array of numbers", array)
        return [float(v) for v in array.values()]

    def integer_per_layer(self, key: str, layers: int, default: int | None = None) -> tuple[int, ...]:
        """A key that holds one number for all layers or an array of one per layer."""
        if isinstance(self.metadata.get(self._key(key)), GgufArray):
            values = self.integers(key)
            if len(values) < layers:
                raise self._mismatch(key, f"{layers} values", f"{len(values)} values")
            return tuple(values[:layers])
        return (self.integer(key, default),) * layers

    def _key(self, key: str) -> str:
        return key.replace("{arch}", str(self.metadata.get("general.architecture"))) if "{arch}" in key else key

    def _get(self, key: str, default: Scalar | None) -> Scalar | GgufArray:
        value = self.metadata.get(self._key(key), default)
        if value is None:
            raise GgufError(self.path, f"key {self._key(key)}", "missing")
        return value

    def _array(self, key: str) -> GgufArray:
        value = self._get(key, None)
        if not isinstance(value, GgufArray):
            raise self._mismatch(key, "an array", value)
        return value

    def _mismatch(self, key: str, wanted: str, value: object) -> GgufError:
        found = f"an array of {value.length}" if isinstance(value, GgufArray) else repr(value)[:80]
        return GgufError(self.path, f"key {self._key(key)}", f"should be {wanted}, is {found}")


def read_header(path: Path, limits: Limits | None = None) -> GgufHeader:
    """Read and check the header of `path` and, when it is one part of a split file, of all parts. Raises GgufError."""
    limits = limits or Limits()
    files = split_files(path)
    parts = [_read_file(file, index, limits) for index, file in enumerate(files)]
    if len(parts) > 1:
        _check_split(files, parts)
    tensors: dict[str, TensorInfo] = {}
    for part in parts:
        for tensor in part.tensors:
            if tensor.name in tensors:
                first = files[tensors[tensor.name].file].name
                raise GgufError(files[tensor.file], f"tensor {tensor.name}", f"is there twice (also in {first})")
            tensors[tensor.name] = tensor
    digest = hashlib.sha256("".join(f"{part.digest}:{part.size};" for part in parts).encode()).hexdigest()
    header = GgufHeader(
        files=files,
        file_bytes=tuple(part.size for part in parts),
        version=parts[0].version,
        metadata=MappingProxyType(parts[0].metadata),
        tensors=MappingProxyType(tensors),
        identity=digest,
    )
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,63}", header.architecture):
        raise GgufError(path, "key general.architecture", f"not an architecture's name: {header.architecture[:80]!r}")
    return header


def split_files(path: Path) -> tuple[Path, ...]:
    """All parts of a split file, given any one of them; (path,) for a whole one. Raises GgufError when parts lack."""
    match = _SPLIT.search(path.name)
    if not match:
        return (path,)
    count, stem = int(match[2]), path.name[: match.start()]
    if not 1 <= int(match[1]) <= count:
        raise GgufError(path, "file name", f"part {match[1]} of {match[2]}")
    files: list[Path] = []
    for number in range(1, count + 1):
        part = path.with_name(f"{stem}-{number:05d}-of-{match[2]}.gguf")
        if not part.exists():
            raise GgufError(path, "split file", f"part {number} of {count} is missing: {part}")
        files.append(part)
    return tuple(files)


@dataclass(frozen=True, slots=True)
class Part:
    """One file's header. `digest`: SHA-256 (hex) of its bytes up to the tensor data."""

    version: int
    size: int
    metadata: dict[str, Scalar | GgufArray]
    tensors: list[TensorInfo]
    digest: str


def _read_file(path: Path, index: int, limits: Limits) -> Part:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise GgufError(path, "file", "not a regular file")
        with path.open("rb", buffering=1 << 18) as stream:
            return parse_part(stream, status.st_size, path, index, limits)
    except OSError as error:
        raise GgufError(path, "file", error.strerror or str(error)) from None


def parse_part(stream: BinaryIO, size: int, path: Path, index: int = 0, limits: Limits | None = None) -> Part:
    """One file's header from a seekable stream of `size` bytes."""
    cursor = Cursor(stream, size, path, limits or Limits())
    version = _magic(cursor)
    tensor_count = cursor.count(_MIN_TENSOR_BYTES, cursor.limits.tensors, "tensor count")
    key_count = cursor.count(_MIN_KEY_BYTES, cursor.limits.keys, "key count")
    metadata = _metadata(cursor, key_count)
    listed = [_tensor(cursor, number) for number in range(tensor_count)]
    header_end = cursor.at
    tensors = _place(cursor, listed, _alignment(cursor, metadata), index)
    stream.seek(0)
    digest = hashlib.sha256(stream.read(header_end)).hexdigest()
    return Part(version, size, metadata, tensors, digest)


def _magic(cursor: Cursor) -> int:
    if cursor.left < 24 or cursor.take(4, "magic") != b"GGUF":
        raise cursor.fail("magic", "not a GGUF file")
    version = cursor.u32("version")
    if version in (2, 3):
        return version
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if swapped in (2, 3):
        raise cursor.fail("version", "a big-endian file; convert it to little-endian")
    raise cursor.fail("version", f"{version} is not supported (2 and 3 are)")


def _metadata(cursor: Cursor, count: int) -> dict[str, Scalar | GgufArray]:
    metadata: dict[str, Scalar | GgufArray] = {}
    for number in range(count):
        key = cursor.text(cursor.limits.name_bytes, f"name of key {number} of {count}")
        if key in metadata:
            raise cursor.fail(f"key {key}", "is there twice")
        metadata[key] = cursor.value(cursor.u32(f"key {key}"), key)
    return metadata


def _alignment(cursor: Cursor, metadata: dict[str, Scalar | GgufArray]) -> int:
    value = metadata.get("general.alignment", 32)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 20 or value & (value - 1):
        raise cursor.fail("key general.alignment", "must be a power of two up to 1 MiB")
    return value


def _tensor(cursor: Cursor, number: int) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    """(name, shape, type, offset into the data section)."""
    name = cursor.text(cursor.limits.name_bytes, f"name of tensor {number}")
    where = f"tensor {name}"
    rank = cursor.u32(where)
    if not 1 <= rank <= _MAX_DIMS:
        raise cursor.fail(where, f"{rank} dimensions (1 to {_MAX_DIMS} are possible)")
    shape = tuple(cursor.u64(where) for _ in range(rank))
    if min(shape) < 1 or math.prod(shape) > _MAX_ELEMENTS:
        raise cursor.fail(where, f"impossible shape {list(shape)}")
    raw = cursor.u32(where)
    try:
        kind = GGMLQuantizationType(raw)
        block, _ = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise cursor.fail(where, f"unknown quantisation type {raw}") from None
    if shape[0] % block:
        raise cursor.fail(where, f"rows of {shape[0]} do not hold whole {kind.name} blocks of {block}")
    return name, shape, kind, cursor.u64(where)


def _place(
    cursor: Cursor, listed: list[tuple[str, tuple[int, ...], GGMLQuantizationType, int]], alignment: int, file: int
) -> list[TensorInfo]:
    """Turn offsets into places in the file; each tensor must lie inside it, aligned, and on no other."""
    start = -(-cursor.at // alignment) * alignment
    tensors: list[TensorInfo] = []
    names: set[str] = set()
    for name, shape, kind, offset in listed:
        where = f"tensor {name}"
        block, size = GGML_QUANT_SIZES[kind]
        info = TensorInfo(name, shape, kind, file, start + offset, math.prod(shape) // block * size)
        if name in names:
            raise cursor.fail(where, "is there twice")
        if offset % alignment:
            raise cursor.fail(where, f"offset {offset} is not a multiple of the alignment {alignment}")
        if info.offset + info.bytes > cursor.size:
            raise cursor.fail(
                where,
                f"its data ({kind.name} {list(shape)}) would end at byte {info.offset + info.bytes}, "
                f"the file ends at {cursor.size} (truncated?)",
            )
        names.add(name)
        tensors.append(info)
    last_end, last_name = start, ""
    for info in sorted(tensors, key=lambda t: t.offset):
        if info.offset < last_end:
            raise cursor.fail(f"tensor {info.name}", f"its data overlaps that of {last_name}")
        last_end, last_name = info.offset + info.bytes, info.name
    return tensors


def _check_split(files: tuple[Path, ...], parts: list[Part]) -> None:
    for number, (file, part) in enumerate(zip(files, parts, strict=True)):
        for key, wanted in (("split.count", len(files)), ("split.no", number)):
            if part.metadata.get(key) != wanted:
                raise GgufError(file, f"key {key}", f"is {part.metadata.get(key)!r}, the file's name says {wanted}")
    total = sum(len(part.tensors) for part in parts)
    claimed = parts[0].metadata.get("split.tensors.count", total)
    if claimed != total:
        raise GgufError(files[0], "key split.tensors.count", f"is {claimed!r}, the parts hold {total} tensors")
