"""What the bytes of a GGUF tensor mean, in float64.

`codes` is the one place that knows GGML's block layouts (source: ggml-quants.c and gguf-py's quants.py). Everything
else, the repacker too, sees integer codes, scales and offsets. `dequantize` rounded to float32 equals gguf-py's
`dequantize` bit for bit (tests/unit/kernels/test_reference.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 = 0, 1, 2, 3, 6, 7, 8
Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS = 12, 13, 14, 20, 23

NAMES = {
    Q4_0: "Q4_0",
    Q4_1: "Q4_1",
    Q5_0: "Q5_0",
    Q5_1: "Q5_1",
    Q8_0: "Q8_0",
    Q4_K: "Q4_K",
    Q5_K: "Q5_K",
    Q6_K: "Q6_K",
    IQ4_NL: "IQ4_NL",
    IQ4_XS: "IQ4_XS",
}
BLOCK = {
    Q4_0: (32, 18),
    Q4_1: (32, 20),
    Q5_0: (32, 22),
    Q5_1: (32, 24),
    Q8_0: (32, 34),
    Q4_K: (256, 144),
    Q5_K: (256, 176),
    Q6_K: (256, 210),
    IQ4_NL: (32, 18),
    IQ4_XS: (256, 136),
}
"""GGML type -> (weights, bytes) of one block."""

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True)
class Codes:
    """R rows of K weights: `w[r, k] = scale[r, k // group] * (value(q[r, k]) - zero) + offset[r, k // 32]`.

    `q` uint8 [R, K]. `scale` float64 [R, K/group], exact. `offset` float64 [R, K/32], exact, or None (no offset).
    `value` is the identity, except for IQ4 (`table`): IQ4_VALUES[q].
    """

    q: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None
    group: int
    zero: int
    table: bool = False


def columns(raw: torch.Tensor, ggml_type: int) -> int:
    """Weights a row of `raw` uint8 [..., bytes] holds."""
    weights, size = BLOCK[ggml_type]
    assert raw.shape[-1] % size == 0, (tuple(raw.shape), NAMES[ggml_type])
    return int(raw.shape[-1]) // size * weights


def codes(raw: torch.Tensor, ggml_type: int) -> Codes:
    """Take apart raw uint8 [R, bytes] of GGML type `ggml_type` (a key of BLOCK). Runs where `raw` lives."""
    rows, width = raw.shape[0], columns(raw, ggml_type)
    blocks = raw.reshape(rows, -1, BLOCK[ggml_type][1])
    if ggml_type in (Q4_K, Q5_K):
        return _k45(blocks, rows, width, ggml_type)
    if ggml_type == Q6_K:
        return _k6(blocks, rows, width)
    if ggml_type == IQ4_XS:
        return _iq4_xs(blocks, rows, width)
    return _simple(blocks, rows, width, ggml_type)


def dequantize(raw: torch.Tensor, ggml_type: int) -> torch.Tensor:
    """raw uint8 [R, bytes] -> float64 [R, K]."""
    return weights(codes(raw, ggml_type))


def weights(c: Codes) -> torch.Tensor:
    """The weights that `c` stands for, float64 [R, K]."""
    if c.table:
        value = torch.tensor(IQ4_VALUES, dtype=torch.float64, device=c.q.device)[c.q.int()]
    else:
        value = c.q.double() - c.zero
    w = c.scale.repeat_interleave(c.group, -1) * value
    return w if c.offset is None else w + c.offset.repeat_interleave(32, -1)


def _half(two_bytes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 2] -> float64 [...]."""
    return two_bytes.contiguous().view(torch.float16)[..., 0].double()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., n] -> uint8 [..., 2n]: all low nibbles, then all high ones."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _simple(blocks: torch.Tensor, rows: int, width: int, ggml_type: int) -> Codes:
    """Blocks of 32 with one fp16 scale (and one fp16 minimum for the _1 types)."""
    scale = _half(blocks[..., :2])
    if ggml_type == Q8_0:
        return Codes((blocks[..., 2:] ^ 128).reshape(rows, width), scale, None, 32, 128)
    offset = _half(blocks[..., 2:4]) if ggml_type in (Q4_1, Q5_1) else None
    head = 2 if offset is None else 4
    if ggml_type in (Q5_0, Q5_1):
        high = blocks[..., head : head + 4, None]
        bits = (high >> torch.arange(8, dtype=torch.uint8, device=blocks.device)) & 1
        q = _nibbles(blocks[..., head + 4 :]) | (bits.reshape(*blocks.shape[:2], 32) << 4)
        zero = 16 if offset is None else 0
    else:
        q = _nibbles(blocks[..., head:])
        zero = 8 if ggml_type == Q4_0 else 0
    return Codes(q.reshape(rows, width), scale, offset, 32, zero, table=ggml_type == IQ4_NL)


def _k45(blocks: torch.Tensor, rows: int, width: int, ggml_type: int) -> Codes:
    """Super-blocks of 256: fp16 d and dmin, eight 6-bit scales and minima packed in 12 bytes."""
    s = blocks[..., 4:16]
    low, mid, top = s[..., 0:4], s[..., 4:8], s[..., 8:12]
    sc = torch.cat([low & 63, (top & 15) | ((low >> 6) << 4)], -1)
    mn = torch.cat([mid & 63, (top >> 4) | ((mid >> 6) << 4)], -1)
    first = 16 if ggml_type == Q4_K else 48
    q = _nibbles(blocks[..., first:].reshape(rows, -1, 4, 32)).reshape(rows, -1, 8, 32)
    if ggml_type == Q5_K:
        shift = torch.arange(8, dtype=torch.uint8, device=blocks.device).view(8, 1)
        q = q | (((blocks[..., None, 16:48] >> shift) & 1) << 4)
    scale = _half(blocks[..., 0:2])[..., None] * sc.double()
    offset = -(_half(blocks[..., 2:4])[..., None] * mn.double())
    return Codes(q.reshape(rows, width), scale.reshape(rows, -1), offset.reshape(rows, -1), 32, 0)


def _k6(blocks: torch.Tensor, rows: int, width: int) -> Codes:
    """Super-blocks of 256: 4 low bits, 2 high bits, sixteen int8 scales, fp16 d."""
    low = blocks[..., :128].reshape(rows, -1, 2, 2, 32)
    low = torch.cat([low & 15, low >> 4], 3)
    shift = (torch.arange(4, dtype=torch.uint8, device=blocks.device) * 2).view(4, 1)
    high = (blocks[..., 128:192].reshape(rows, -1, 2, 1, 32) >> shift) & 3
    sc = blocks[..., 192:208].contiguous().view(torch.int8).double()
    scale = _half(blocks[..., 208:210])[..., None] * sc
    return Codes((low | (high << 4)).reshape(rows, width), scale.reshape(rows, -1), None, 16, 32)


def _iq4_xs(blocks: torch.Tensor, rows: int, width: int) -> Codes:
    """Super-blocks of 256: fp16 d, eight 6-bit scales (4 low bits, 2 high), nibbles that index IQ4_VALUES."""
    shift = torch.tensor([0, 4], dtype=torch.uint8, device=blocks.device)
    low = ((blocks[..., 4:8, None] >> shift) & 15).reshape(rows, -1, 8)
    pairs = torch.arange(4, dtype=torch.uint8, device=blocks.device) * 2
    high = ((blocks[..., 2:4, None] >> pairs) & 3).reshape(rows, -1, 8)
    scale = _half(blocks[..., 0:2])[..., None] * ((low | (high << 4)).double() - 32)
    q = _nibbles(blocks[..., 8:].reshape(rows, -1, 8, 16))
    return Codes(q.reshape(rows, width), scale.reshape(rows, -1), None, 32, 0, table=True)
