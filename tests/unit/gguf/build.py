"""GGUF bytes by hand, so that tests can also write what no writer would."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

U8, I8, U16, I16, U32, I32, F32, BOOL, STR, ARR, U64, I64, F64 = range(13)
_CODE = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def typed(value: object, kind: int | None = None) -> bytes:
    """type number and value, as it stands behind a key."""
    if kind is None:
        kind = {bool: BOOL, int: U32, float: F32, str: STR, bytes: STR, list: ARR, tuple: ARR}[type(value)]
    if kind == STR:
        return struct.pack("<I", STR) + text(value)  # type: ignore[arg-type]
    if kind == ARR:
        items = list(value)  # type: ignore[call-overload]
        inner = typed(items[0])[:4] if items else struct.pack("<I", U32)
        return struct.pack("<I", ARR) + inner + struct.pack("<Q", len(items)) + b"".join(typed(i)[4:] for i in items)
    return struct.pack("<I" + _CODE[kind], kind, value)


@dataclass
class Tensor:
    name: str
    shape: Sequence[int]
    kind: int = GGMLQuantizationType.F32
    offset: int | None = None
    data: bytes | None = None

    @property
    def size(self) -> int:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(self.kind)]
        elements = 1
        for n in self.shape:
            elements *= n
        return elements // block * size


@dataclass
class File:
    """`keys` may hold (key, value) or (key, raw typed bytes). Counts can be forged."""

    keys: list[tuple[str, object]] = field(default_factory=lambda: [("general.architecture", "llama")])
    tensors: list[Tensor] = field(default_factory=list)
    version: int = 3
    magic: bytes = b"GGUF"
    key_count: int | None = None
    tensor_count: int | None = None
    alignment: int = 32

    def header(self) -> bytes:
        out = self.magic + struct.pack("<I", self.version)
        out += struct.pack("<Q", len(self.tensors) if self.tensor_count is None else self.tensor_count)
        out += struct.pack("<Q", len(self.keys) if self.key_count is None else self.key_count)
        for key, value in self.keys:
            out += text(key) + (value.raw if isinstance(value, Raw) else typed(value))
        at = 0
        for t in self.tensors:
            place = at if t.offset is None else t.offset
            out += text(t.name) + struct.pack(f"<I{len(t.shape)}QIQ", len(t.shape), *t.shape, t.kind, place)
            if t.kind in GGML_QUANT_SIZES and t.offset is None:
                at += -(-t.size // self.alignment) * self.alignment
        return out + b"\0" * (-len(out) % self.alignment)

    def bytes(self) -> bytes:
        out = self.header()
        for t in self.tensors:
            data = t.data if t.data is not None else bytes(t.size)
            out += data + b"\0" * (-len(data) % self.alignment)
        return out

    def write(self, path: Path) -> Path:
        path.write_bytes(self.bytes())
        return path


@dataclass(frozen=True)
class Raw:
    """A value given as its bytes, type number included."""

    raw: bytes


def rich() -> File:
    """A small valid file that holds every kind of value."""
    scalars = [(f"x.k{kind}", Raw(typed(1, kind))) for kind in _CODE if kind not in (F32, F64, BOOL)]
    return File(
        keys=[
            ("general.architecture", "llama"),
            ("general.name", "little"),
            ("llama.block_count", 2),
            ("llama.rope.freq_base", 10000.0),
            *scalars,
            ("x.f64", Raw(typed(1.5, F64))),
            ("x.yes", True),
            ("tokenizer.ggml.tokens", ["a", "b", "é", "<|end|>"]),
            ("tokenizer.ggml.token_type", [1, 1, 1, 3]),
            ("tokenizer.ggml.scores", [0.0, -1.0, -2.0, -3.0]),
            ("tokenizer.chat_template", "{{ messages }}"),
        ],
        tensors=[
            Tensor("token_embd.weight", (64, 4)),
            Tensor("blk.0.attn_q.weight", (64, 64), GGMLQuantizationType.Q8_0),
            Tensor("blk.0.ffn_gate_exps.weight", (64, 32, 4), GGMLQuantizationType.Q4_0),
            Tensor("output_norm.weight", (64,)),
        ],
    )
