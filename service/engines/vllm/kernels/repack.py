"""Raw GGUF rows -> `Packed`: the same weights, laid out so that a GPU reads them at the speed of its memory.

Five forms cover ten GGML types. K runs in pieces of 64 weights ("kb"); N is padded to a multiple of 64 with zero rows.

AFFINE4  5.0 bits a weight, Q4_0 Q4_1 Q4_K:  nibbles; s and o for each 32
AFFINE5  6.0, Q5_0 Q5_1 Q5_K:                nibbles, 1 high bit; s and o for each 32
SIGNED6  7.0, Q6_K:                          nibbles, 2 high bits; s for each 16
SIGNED8  8.5, Q8_0:                          int8; s for each 32
TABLE4   4.5, IQ4_NL IQ4_XS:                 nibbles that index a table; s for each 32

low     uint8 [E, KB, N, 32]: nibbles of k (low) and k + 32 (high). TABLE4: of two bytes the first has the nibbles of
        k and k + 1, the second those of k + 32 and k + 33. SIGNED8: code + 128, [E, 2 KB, N, 32].
high    uint8. AFFINE5 [E, KB/4, N, 32]: bit g of a byte belongs to group g of 32 of the 256. SIGNED6 [E, KB/2, N, 32]:
        two bits for each of the four groups of 32. Otherwise empty.
scales  [E, KB, N]: the fp16 numbers of a piece in one integer. int64 (s0, o0, s1, o1) for AFFINE, (s0, s2, s1, s3) for
        SIGNED6, int32 (s0, s1) for the others.

Scales are fp16, times a power of two chosen per tensor so that the largest sits just under fp16's limit: `alpha`
undoes it on the output. So no scale overflows, and subnormal ones become normal (Q4_K with d = 6e-8 is exact).
They carry 2^20 to 2^24 more (SUBNORMAL), because the kernels feed the codes to the FMA as fp16 subnormals. So weights
are at most 0.25 to 0.5, and those under 2^-14 lose bits: rows 4000 times smaller than the tensor's largest weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from service.engines.vllm.kernels import reference as ref

AFFINE4, AFFINE5, SIGNED6, SIGNED8, TABLE4 = 4, 5, 6, 8, 14
FORM = {
    ref.Q4_0: AFFINE4,
    ref.Q4_1: AFFINE4,
    ref.Q4_K: AFFINE4,
    ref.Q5_0: AFFINE5,
    ref.Q5_1: AFFINE5,
    ref.Q5_K: AFFINE5,
    ref.Q6_K: SIGNED6,
    ref.Q8_0: SIGNED8,
    ref.IQ4_NL: TABLE4,
    ref.IQ4_XS: TABLE4,
}
"""GGML type -> form. What is not here stays with vllm-gguf-plugin's kernels."""

BITS = {AFFINE4: 5.0, AFFINE5: 6.0, SIGNED6: 7.0, SIGNED8: 8.5, TABLE4: 4.5}
"""Bits a weight in each form (GGML's own: Q4_K 4.5, Q5_K 5.5, Q6_K 6.56, Q8_0 8.5, Q4_1 5, IQ4_XS 4.25)."""

UNIT = {AFFINE4: 1, AFFINE5: 4, SIGNED6: 2, SIGNED8: 1, TABLE4: 1}
"""Pieces of 64 that K is padded to (with zero weights): one byte of the high plane spans that many."""

AFFINE = (AFFINE4, AFFINE5)

SUBNORMAL = {AFFINE4: 20, AFFINE5: 21, SIGNED6: 22, SIGNED8: 24, TABLE4: 24}
"""log2 of what the scale carries because codes enter the FMA as subnormals (code << 4, << 3, << 2, as it is: units of
2^-24). The codes of the last three forms are 32, 128 and 128 too large there, which the kernels take off."""

TOP = 15
"""Scales are normalised to at most 2^15: half of fp16's limit, so that rounding cannot pass it."""

CHUNK = 1 << 25
"""Weights taken apart at a time: bounds the extra memory to about 32 bytes times this (1 GiB) beside the result."""


@dataclass(frozen=True)
class Packed:
    """One matrix [N, K] (E = 1) or a stack of experts [E, N, K], ready for the kernels.

    `n`, `k` are the true sizes; the planes are padded (see the module's table). Output = product times `alpha`.
    Gate and up rows of a `w13` stack are interleaved: row 2i is gate i, row 2i+1 is up i.
    """

    form: int
    n: int
    k: int
    alpha: float
    low: torch.Tensor
    high: torch.Tensor
    scales: torch.Tensor

    @property
    def experts(self) -> int:
        return int(self.low.shape[0])

    @property
    def rows(self) -> int:
        """N as stored."""
        return int(self.scales.shape[2])

    @property
    def pieces(self) -> int:
        """K / 64 as stored."""
        return int(self.scales.shape[1])

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.low, self.high, self.scales))


def repack(raw: torch.Tensor, ggml_type: int, *, interleave: bool = False) -> Packed:
    """raw uint8 [N, bytes] or [E, N, bytes] -> Packed on the same device. Peak extra memory: see CHUNK.

    `interleave`: the rows are I gates followed by I ups (N = 2 I).
    """
    return repack_shards([(raw, ggml_type)], interleave=interleave)


def repack_shards(shards: list[tuple[torch.Tensor, int]], *, interleave: bool = False) -> Packed:
    """Join shards along N (fused projections), in the order given. Their types must share a form and their K."""
    stacks = [raw if raw.ndim == 3 else raw[None] for raw, _ in shards]
    types = [t for _, t in shards]
    form = FORM[types[0]]
    k = ref.columns(stacks[0], types[0])
    experts, n = stacks[0].shape[0], sum(s.shape[1] for s in stacks)
    for stack, t in zip(stacks, types, strict=True):
        assert FORM[t] == form and ref.columns(stack, t) == k and stack.shape[0] == experts, (types, n, k)
    assert not (interleave and len(shards) > 1), "interleave one stack of gate and up rows"
    out = _Planes(experts, n, k, form, stacks[0].device)
    row = 0
    for stack, t in zip(stacks, types, strict=True):
        if interleave:
            stack = stack.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        for e0, e1, r0, r1 in _chunks(experts, stack.shape[1], k):
            part = stack[e0:e1, r0:r1]
            out.put(ref.codes(part.reshape(-1, part.shape[2]), t), e0, e1, row + r0, row + r1)
        row += stack.shape[1]
    return out.finish()


def _chunks(experts: int, n: int, k: int) -> list[tuple[int, int, int, int]]:
    """Boxes (e0, e1, r0, r1) of at most CHUNK weights (or one row) that cover experts x n."""
    e_step = max(1, CHUNK // (n * k))
    r_step = n if n * k <= CHUNK else max(1, CHUNK // k)
    return [
        (e, min(e + e_step, experts), r, min(r + r_step, n))
        for e in range(0, experts, e_step)
        for r in range(0, n, r_step)
    ]


class _Planes:
    """The result while it is being filled; scales stay float32 (exact for every type) until their maximum is known."""

    def __init__(self, experts: int, n: int, k: int, form: int, device: torch.device) -> None:
        self.form, self.n, self.k = form, n, k
        unit = 64 * UNIT[form]
        self.k_padded = -(-k // unit) * unit
        rows, kb = -(-n // 64) * 64, self.k_padded // 64

        def plane(pieces: int) -> torch.Tensor:
            return torch.zeros(experts, pieces, rows, 32, dtype=torch.uint8, device=device)

        self.low = plane(2 * kb if form == SIGNED8 else kb)
        self.high = plane(kb // 4) if form == AFFINE5 else plane(kb // 2) if form == SIGNED6 else plane(0)
        fields = 2 if form in (SIGNED8, TABLE4) else 4
        self.scales = torch.zeros(experts, kb, rows, fields, dtype=torch.float32, device=device)

    def put(self, c: ref.Codes, e0: int, e1: int, r0: int, r1: int) -> None:
        """Place the rows r0..r1 of the experts e0..e1, in order, into the planes."""
        experts, pad = e1 - e0, self.k_padded - self.k

        def laid(t: torch.Tensor, width: int) -> torch.Tensor:
            """[experts * rows, pieces * width] -> [experts, pieces, rows, width]"""
            return t.reshape(experts, r1 - r0, -1, width).transpose(1, 2)

        q = torch.nn.functional.pad(c.q, (0, pad), value=c.zero)
        if self.form == SIGNED8:
            self.low[e0:e1, :, r0:r1] = laid(q, 32)
        elif self.form == TABLE4:
            both = q.reshape(q.shape[0], -1, 2, 16, 2).transpose(2, 3).flatten(2)
            self.low[e0:e1, :, r0:r1] = laid((both[:, :, 0::2] & 15) | ((both[:, :, 1::2] & 15) << 4), 32)
        else:
            pair = q.reshape(q.shape[0], -1, 2, 32)
            self.low[e0:e1, :, r0:r1] = laid((pair[:, :, 0] & 15) | ((pair[:, :, 1] & 15) << 4), 32)
        if self.form == AFFINE5:
            groups = q.reshape(q.shape[0], -1, 8, 32) >> 4
            self.high[e0:e1, :, r0:r1] = laid(_merge(groups, 1), 32)
        if self.form == SIGNED6:
            groups = q.reshape(q.shape[0], -1, 4, 32) >> 4
            self.high[e0:e1, :, r0:r1] = laid(_merge(groups, 2), 32)
        scale = torch.nn.functional.pad(c.scale, (0, pad // c.group)).float()
        if self.form in AFFINE:
            offset = c.offset if c.offset is not None else c.scale * -c.zero
            offset = torch.nn.functional.pad(offset, (0, pad // 32)).float()
            scale = torch.stack([scale, offset], -1).flatten(1)
        self.scales[e0:e1, :, r0:r1] = laid(scale, self.scales.shape[-1])

    def finish(self) -> Packed:
        """Choose the power of two, round the scales to fp16 and pack them into one integer a piece and row."""
        scales, exponent = self.scales, 0
        carried = SUBNORMAL[self.form]
        if self.form in AFFINE:
            biggest_code = 15 if self.form == AFFINE4 else 31
            scale, offset = scales[..., 0::2], scales[..., 1::2]
            # |offset| and |scale * code + offset| both stay under 2^TOP as well
            reach = _log2_ceil((scale.abs() * biggest_code).max() + offset.abs().max())
            exponent = max(_log2_ceil(scale.abs().max()) + carried, reach) - TOP
            scale *= 2.0 ** (carried - exponent)
            offset *= 2.0**-exponent
        else:
            exponent = _log2_ceil(scales.abs().max()) + carried - TOP
            scales *= 2.0 ** (carried - exponent)
        if self.form == SIGNED6:
            scales = scales[..., [0, 2, 1, 3]]
        fields = scales.shape[-1]
        packed = scales.half().view(torch.int64 if fields == 4 else torch.int32)[..., 0]
        return Packed(self.form, self.n, self.k, 2.0**exponent, self.low, self.high, packed)


def _merge(groups: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [R, pieces, G, 32] of `bits`-wide values -> [R, pieces, 32] with group g at bit g * bits."""
    out = groups[:, :, 0].clone()
    for g in range(1, groups.shape[2]):
        out |= groups[:, :, g] << (g * bits)
    return out


def _log2_ceil(value: torch.Tensor) -> int:
    """Least e with value <= 2^e; for zero (an empty tensor of weights) 0. Raises on a scale that is not finite."""
    v = float(value)
    if not math.isfinite(v):
        raise ValueError("a scale in this tensor is not finite: the file is damaged")
    return math.ceil(math.log2(v)) if v > 0 else 0
