"""Device code: `Packed` planes -> fp16 weights in registers -> tensor cores, and the guards around it.

The weight tile [BN, 32] is the left operand of every dot, the tokens [32, BM] the right one: at decode there are few
tokens, and the wide side of the tensor core's instruction should be the weights.

ASM = True reads four bytes at a time through inline PTX (mma.sync and lop3/prmt only: runs on sm_80 and later);
ASM = False is the same arithmetic in plain Triton, for the interpreter and for other back ends.

Guard against fp16's range. Tokens are fed as fp16. That is exact for bf16 values from 2^-14 to 65504, but beyond it
they become infinite. A column of the accumulator that met an infinite token is never finite (inf * 0 is NaN), so each
program looks at its accumulator once: if it is not finite, or so small that the tokens must have been subnormal, it
does its work again with each token scaled by a power of two. The usual case pays one reduction. The second copy of the
loop would cost registers, and so occupancy: launchers cap them (`registers`), and what spills is used outside the loop.
"""

# Triton functions are not Python functions: types are the compiler's business.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def _decode_asm(form, j):
    """PTX that turns four bytes of `low` (and of `high`) into four weights for k and four for k + 32, as f16x2 pairs.

    `j`: which piece of 64 inside the 256 that a byte of `high` spans. Operands: $0-$1 weights k, $2-$3 weights k + 32,
    $4 low, [$5 high or second low], then the scales, one register per f16x2.
    """
    lines = ["{ .reg .b32 l,h,t,u,v,c,o;"]
    if form in (4, 5):
        # code << shift, with a zero byte above it, is the fp16 subnormal code * 2^(shift - 24): no bias to subtract
        shift, first = (4, 5) if form == 4 else (3, 6)
        mask = f"0x{15 << shift:02x}" + f"{15 << shift:02x}" * 3
        lines += ["mov.b32 c, 0;", f"shl.b32 l, $4, {shift}; and.b32 l, l, {mask};"]
        lines += ["mov.b32 h, $4;" if shift == 4 else f"shr.u32 h, $4, {4 - shift};", f"and.b32 h, h, {mask};"]
        if form == 5:
            lines += [_bits("l", 2 * j, 7, 1), _bits("h", 2 * j + 1, 7, 1)]
        for i, word in ((0, "l"), (2, "h")):
            for half, select in ((0, "0x4140"), (1, "0x4342")):
                out, scale = i + half, first + 2 * i + half
                lines.append(
                    f"prmt.b32 ${out}, {word}, c, {select}; fma.rn.f16x2 ${out}, ${out}, ${scale}, ${scale + 2};"
                )
        return " ".join(lines) + " }"
    if form == 14:
        # IQ4: codes index a table of 16 bytes (value + 128): gather four codes into a prmt selector, look both halves
        # of the table up, choose by the code's top bit
        lines += [_table("l", "$4"), "shr.u32 o, $4, 4;", _table("h", "o")]
        bias, first = "0x64806480", 5
    elif form == 8:
        lines += ["xor.b32 l, $4, 0x80808080; xor.b32 h, $5, 0x80808080;"]
        bias, first = "0x64806480", 6
    else:
        lines += ["and.b32 l, $4, 0x0f0f0f0f; shr.u32 h, $4, 4; and.b32 h, h, 0x0f0f0f0f;"]
        lines += [_bits("l", 4 * (j % 2), 4, 2), _bits("h", 4 * (j % 2) + 2, 4, 2)]
        bias, first = "0x64206420", 6
    # byte under 0x64 is fp16 1024 + byte; subtracting 1024 + zero is exact
    lines += [f"mov.b32 c, 0x64646464; mov.b32 o, {bias};"]
    for i, word in ((0, "l"), (2, "h")):
        for half, select in ((0, "0x4140"), (1, "0x4342")):
            out = i + half
            lines.append(f"prmt.b32 ${out}, {word}, c, {select}; sub.rn.f16x2 ${out}, ${out}, o;")
            lines.append(f"mul.rn.f16x2 ${out}, ${out}, ${first + out};")
    return " ".join(lines) + " }"


@triton.constexpr_function
def _bits(word, source, target, width):
    """Move `width` bits of every byte of $5 from bit `source` to bit `target`, and or them into `word`."""
    mask = f"0x{((1 << width) - 1) << target:02x}" + f"{((1 << width) - 1) << target:02x}" * 3
    move = f"shl.b32 t, $5, {target - source};" if source < target else f"shr.u32 t, $5, {source - target};"
    return f"{move} and.b32 t, t, {mask}; or.b32 {word}, {word}, t;"


@triton.constexpr_function
def _table(out, source):
    """Low nibbles of `source` -> bytes IQ4_VALUES + 128 in `out`. The table: 01 18 2d 3f 4f 5d 6a 76 | 81 8d ..."""
    return (
        f"and.b32 t, {source}, 0x0f0f0f0f; shr.u32 u, t, 4; or.b32 t, t, u; prmt.b32 t, t, t, 0x2020; "
        "and.b32 u, t, 0x7777; mov.b32 c, 0x3f2d1801; mov.b32 v, 0x766a5d4f; prmt.b32 v, c, v, u; "
        f"mov.b32 c, 0xa6998d81; mov.b32 {out}, 0xf1d9c5b5; prmt.b32 u, c, {out}, u; "
        f"shr.u32 t, t, 1; and.b32 t, t, 0x4444; or.b32 t, t, 0x3210; prmt.b32 {out}, v, u, t;"
    )


@triton.constexpr_function
def _constraints(form):
    """Four early-clobber outputs, then as many inputs as `_decode_asm(form)` reads."""
    return ",".join(["=&r"] * 4 + ["r"] * {4: 9, 5: 10, 6: 6, 8: 6, 14: 5}[form])


@triton.jit
def _half(word, index: tl.constexpr):
    """The index-th fp16 of an integer."""
    return ((word >> (16 * index)) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _signed_pair(q_lo, q_hi, s_lo, s_hi):
    lo = (q_lo.to(tl.float32) * s_lo.to(tl.float32)).to(tl.float16)
    hi = (q_hi.to(tl.float32) * s_hi.to(tl.float32)).to(tl.float16)
    return lo, hi


@triton.jit
def _table_value(q):
    """IQ4_VALUES[q] from two 64-bit constants of eight (value + 128) bytes."""
    at = ((q & 7) * 8).to(tl.int64)
    below = (0x766A5D4F3F2D1801 >> at) & 0xFF
    above = (-0x0E263A4A5966727F >> at) & 0xFF
    return tl.where(q < 8, below, above).to(tl.int32) - 128


@triton.jit
def piece(low, h, scales, N, kb, J: tl.constexpr, rn, FORM: tl.constexpr, ASM: tl.constexpr, BN: tl.constexpr):
    """Weights of piece `kb` for the rows `rn` [BN]: fp16 [BN, 32] for k..k+31, and for k+32..k+63.

    `h`: the bytes of `high` that span this piece (AFFINE5, SIGNED6). J = kb modulo the pieces that `h` spans.
    """
    r32 = tl.arange(0, 32)
    s = tl.load(scales + kb * N + rn)
    if FORM == 8:
        p = tl.load(low + (2 * kb * N + rn)[:, None] * 32 + r32[None, :])
        p2 = tl.load(low + ((2 * kb + 1) * N + rn)[:, None] * 32 + r32[None, :])
    else:
        p = tl.load(low + (kb * N + rn)[:, None] * 32 + r32[None, :])
        p2 = p
    a = tl.broadcast_to(_half(s, 0)[:, None], [BN, 32])
    b = tl.broadcast_to(_half(s, 1)[:, None], [BN, 32])
    if FORM == 4 or FORM == 5:
        c = tl.broadcast_to(_half(s, 2)[:, None], [BN, 32])
        d = tl.broadcast_to(_half(s, 3)[:, None], [BN, 32])
    if FORM == 6:
        a = tl.where(r32[None, :] < 16, a, b)
        b = tl.where(r32[None, :] < 16, _half(s, 2)[:, None], _half(s, 3)[:, None])
    if ASM:
        asm: tl.constexpr = _decode_asm(FORM, J)
        con: tl.constexpr = _constraints(FORM)
        if FORM == 4:
            lo, hi = tl.inline_asm_elementwise(asm, con, [p, a, b, c, d], (tl.float16, tl.float16), True, 4)
        elif FORM == 5:
            lo, hi = tl.inline_asm_elementwise(asm, con, [p, h, a, b, c, d], (tl.float16, tl.float16), True, 4)
        elif FORM == 6:
            lo, hi = tl.inline_asm_elementwise(asm, con, [p, h, a, b], (tl.float16, tl.float16), True, 4)
        elif FORM == 8:
            lo, hi = tl.inline_asm_elementwise(asm, con, [p, p2, a, b], (tl.float16, tl.float16), True, 4)
        else:
            lo, hi = tl.inline_asm_elementwise(asm, con, [p, a, b], (tl.float16, tl.float16), True, 4)
    else:
        lo, hi = _plain(p, p2, h, s, a, b, J, r32, FORM)
    return lo, hi


@triton.jit
def _plain(p, p2, h, s, a, b, J: tl.constexpr, r32, FORM: tl.constexpr):
    """`piece` without PTX: float32 in between, rounded once to fp16 like the FMA."""
    q_lo = (p & 15).to(tl.int32)
    q_hi = (p >> 4).to(tl.int32)
    if FORM == 8:
        lo, hi = _signed_pair(p.to(tl.int8, bitcast=True), p2.to(tl.int8, bitcast=True), a, b)
    elif FORM == 14:
        lo, hi = _signed_pair(_table_value(q_lo), _table_value(q_hi), a, b)
    elif FORM == 6:
        q_lo = q_lo | (((h >> (4 * (J % 2))) & 3).to(tl.int32) << 4)
        q_hi = q_hi | (((h >> (4 * (J % 2) + 2)) & 3).to(tl.int32) << 4)
        lo, hi = _signed_pair(q_lo - 32, q_hi - 32, a, b)
    else:
        unit = 1.0 / 1048576
        if FORM == 5:
            q_lo = q_lo | (((h >> (2 * J)) & 1).to(tl.int32) << 4)
            q_hi = q_hi | (((h >> (2 * J + 1)) & 1).to(tl.int32) << 4)
            unit = 1.0 / 2097152
        offset_lo, offset_hi = b.to(tl.float32), _half(s, 3)[:, None].to(tl.float32)
        lo = (q_lo.to(tl.float32) * unit * a.to(tl.float32) + offset_lo).to(tl.float16)
        hi = (q_hi.to(tl.float32) * unit * _half(s, 2)[:, None].to(tl.float32) + offset_hi).to(tl.float16)
    return lo, hi


@triton.jit
def tokens(x, k, K, row_ok, factor, MASK_K: tl.constexpr, SCALED: tl.constexpr):
    """fp16 tile [32, BM] of tokens k..k+31, if SCALED times `factor` [BM]. x [1, BM] points to each token's start."""
    r = k + tl.arange(0, 32)[:, None]
    ok = row_ok[None, :] & (r < K) if MASK_K else row_ok[None, :] & (r >= 0)
    v = tl.load(x + r, mask=ok, other=0.0)
    if SCALED:
        v = v.to(tl.float32) * factor[None, :]
    return v.to(tl.float16)


@triton.jit
def unit_dot(
    acc, low, high, scales, N, rn, x, K, row_ok, factor, unit, FORM: tl.constexpr, UNIT: tl.constexpr,
    MASK_K: tl.constexpr, SCALED: tl.constexpr, ASM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """acc [BN, BM] += one unit of W[rn, :] . x: UNIT pieces of 64 columns from column `unit * UNIT * 64`."""
    r32 = tl.arange(0, 32)
    h = 0
    if FORM == 5:
        h = tl.load(high + (unit * N + rn)[:, None] * 32 + r32[None, :])
    for J in tl.static_range(UNIT):
        kb = unit * UNIT + J
        if FORM == 6 and J % 2 == 0:
            h = tl.load(high + (unit * (UNIT // 2) + J // 2) * N * 32 + rn[:, None] * 32 + r32[None, :])
        lo, hi = piece(low, h, scales, N, kb, J, rn, FORM, ASM, BN)
        acc = tl.dot(lo, tokens(x, kb * 64, K, row_ok, factor, MASK_K, SCALED), acc)
        acc = tl.dot(hi, tokens(x, kb * 64 + 32, K, row_ok, factor, MASK_K, SCALED), acc)
    return acc


@triton.jit
def _prefetch(p):
    """The cache line at each pointer into L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [p.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def prefetch_unit(low, high, scales, N, r0, unit, FORM: tl.constexpr, UNIT: tl.constexpr, BN: tl.constexpr):
    """What `unit_dot` will read of the rows r0 .. r0 + BN, into L2."""
    line = tl.arange(0, BN // 4) * 128
    if FORM == 5:
        _prefetch(high + (unit * N + r0) * 32 + line)
    for J in tl.static_range(UNIT):
        kb = unit * UNIT + J
        if FORM == 6 and J % 2 == 0:
            _prefetch(high + ((unit * (UNIT // 2) + J // 2) * N + r0) * 32 + line)
        if FORM == 8:
            _prefetch(low + (2 * kb * N + r0) * 32 + line)
            _prefetch(low + ((2 * kb + 1) * N + r0) * 32 + line)
        else:
            _prefetch(low + (kb * N + r0) * 32 + line)
        _prefetch(scales + kb * N + r0 + tl.arange(0, BN // 16) * 16)


@triton.jit
def bare_product(
    low, high, scales, N, rn, x, K, row_ok, first, COUNT, FORM: tl.constexpr, UNIT: tl.constexpr, MASK_K: tl.constexpr,
    ASM: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`product` for tokens that are known to be in fp16's range."""
    one = tl.full([BM], 1.0, tl.float32)
    acc = tl.zeros([BN, BM], tl.float32)
    for i in tl.range(0, COUNT, num_stages=STAGES):
        acc = unit_dot(acc, low, high, scales, N, rn, x, K, row_ok, one, first + i, FORM, UNIT, MASK_K, False, ASM, BN)
    return acc


@triton.jit
def product(
    low, high, scales, N, rn, x, K, row_ok, first, COUNT, FORM: tl.constexpr, UNIT: tl.constexpr, MASK_K: tl.constexpr,
    ASM: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """W[rn, ks] . x[ks, tokens] over COUNT units from unit `first`: fp32 [BN, BM] before `alpha`, guarded."""
    acc = bare_product(low, high, scales, N, rn, x, K, row_ok, first, COUNT, FORM, UNIT, MASK_K, ASM, BN, BM, STAGES)
    if suspicious(acc, False, FORM):
        factor, back = powers(largest(x, K, row_ok, first * UNIT * 64, COUNT * UNIT * 64, MASK_K, BM))
        acc = tl.zeros([BN, BM], tl.float32)
        for again in tl.range(0, COUNT, num_stages=1):
            acc = unit_dot(acc, low, high, scales, N, rn, x, K, row_ok, factor, first + again, FORM, UNIT, MASK_K, True,
                           ASM, BN)  # fmt: skip
        acc = acc * back[None, :]
    return acc


SMALL = tl.constexpr(2.0**-12)


@triton.jit
def suspicious(acc, NOTHING: tl.constexpr, FORM: tl.constexpr):
    """Whether a tile must be done again: not finite, or a token's outputs all so small that it was subnormal in fp16.

    In units of the normalised weights, whose largest is about 0.5 (AFFINE) or 2^15 (the others): tokens of rms 2e-5,
    where fp16 still keeps 10 bits, give outputs around SMALL. NOTHING: also if the first column is all zeros. Else such
    a column is an empty slot or a token of zeros (the rows that pad a CUDA graph's batch), right as it is; or a token
    with nothing above 6e-8, which counts as zero.
    """
    small = SMALL if FORM == 4 or FORM == 5 else SMALL * 65536.0
    most = tl.max(tl.where(acc == acc, tl.abs(acc), float("inf")), 0)
    fine = ((most >= small) & (most < float("inf"))) | (most == 0.0)
    wrong = tl.max(tl.where(fine, 0, 1), 0) > 0
    if NOTHING:
        wrong = wrong | (tl.max(most, 0) == 0.0)
    return wrong


@triton.jit
def largest(x, K, row_ok, first, COLUMNS, MASK_K: tl.constexpr, BM: tl.constexpr):
    """Largest |token| [BM] over COLUMNS columns from `first`."""
    most = tl.zeros([BM], tl.float32)
    for k in range(0, COLUMNS, 32):
        r = first + k + tl.arange(0, 32)[:, None]
        ok = row_ok[None, :] & (r < K) if MASK_K else row_ok[None, :] & (r >= 0)
        size = tl.abs(tl.load(x + r, mask=ok, other=0.0).to(tl.float32))
        # a maximum forgets NaN, and a token of NaN must not pass for one of zeros
        most = tl.maximum(most, tl.max(tl.where(size == size, size, float("inf")), 0))
    return most


@triton.jit
def powers(most):
    """(factor, back): powers of two with factor * back = 1 and factor * most in [1, 2), kept normal."""
    field = tl.minimum(tl.maximum(most.to(tl.int32, bitcast=True) >> 23, 1), 253)
    return ((254 - field) << 23).to(tl.float32, bitcast=True), (field << 23).to(tl.float32, bitcast=True)


@triton.jit
def row_powers(x, K, BLOCK: tl.constexpr):
    """`powers` of the largest magnitude among the K values from `x`."""
    r = tl.arange(0, BLOCK)
    most = tl.zeros([BLOCK], tl.float32)
    for k in range(0, K, BLOCK):
        most = tl.maximum(most, tl.abs(tl.load(x + k + r, mask=k + r < K, other=0.0).to(tl.float32)))
    return powers(tl.max(most, 0))


@triton.jit
def joined(base, STEP, SPLIT, ok, BN: tl.constexpr, BM: tl.constexpr):
    """Sum over SPLIT partial tiles [BN, BM], STEP apart, in their order; four loads are under way at a time, where
    registers hold them."""
    TOGETHER: tl.constexpr = 4 if BN * BM <= 64 * 16 else 1
    total = tl.zeros([BN, BM], tl.float32)
    for first in range(0, SPLIT, TOGETHER):
        for j in tl.static_range(TOGETHER):
            at = first + j
            total += tl.load(base + at * STEP, mask=ok & (at < SPLIT), other=0.0, cache_modifier=".cg")
    return total
