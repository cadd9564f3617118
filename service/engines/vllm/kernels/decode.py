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
    $4 low, [$5 high or second low], then four words of two fp16 scales, one a byte: s for k and for k + 32. AFFINE:
    eight, s and o for k, then s and o for k + 32. Bytes 0-1 and bytes 2-3 are neighbours in a row each, but the two
    pairs may be of two rows: that is the compiler's choice, and differs between the tensor core's instructions.

    A code of up to 8 bits with a zero byte above it is the fp16 subnormal code * 2^-24, so one FMA makes the weight,
    with no bias to subtract: code * s + o, rounded once.
    """
    lines = ["{ .reg .b32 l,h,t,u,v,c,s0,o0,s1,o1; .reg .b16 x,y;"]
    words = 5 if form == 4 or form == 14 else 6
    if form == 14:
        lines += [_table()]
    elif form == 8:
        lines += ["mov.b32 l, $4; mov.b32 h, $5;"]
    else:
        shift = {4: 4, 5: 3, 6: 2}[form]
        mask = f"0x{15 << shift:02x}" + f"{15 << shift:02x}" * 3
        lines += [f"shl.b32 l, $4, {shift}; and.b32 l, l, {mask};"]
        lines += ["mov.b32 h, $4;" if shift == 4 else f"shr.u32 h, $4, {4 - shift};", f"and.b32 h, h, {mask};"]
    if form == 5:
        lines += [_bits("l", 2 * j, 7, 1), _bits("h", 2 * j + 1, 7, 1)]
    if form == 6:
        lines += [_bits("l", 4 * (j % 2), 6, 2), _bits("h", 4 * (j % 2) + 2, 6, 2)]
    for pair in (0, 1):
        word = f"${words + 2 * pair}"
        if form == 4 or form == 5:
            lines += [_twice("s0", "o0", word), _twice("s1", "o1", f"${words + 4 + 2 * pair}")]
        else:
            # o = -32 s (SIGNED6, whose codes are in units of 2^-22) or -128 s: -2^-17 of what is stored
            lines += [_twice("s0", "s1", word), f"mov.b32 t, 0x80808080; mul.rn.f16x2 t, {word}, t;"]
            lines += [_twice("o0", "o1", "t")]
        lines += ["mov.b32 c, 0;"]
        for i, source in ((0, "l"), (1, "h")):
            select = ("0x4140", "0x4342")[pair]
            if form == 14:  # a register a pair, k in its lower half and k + 32 in the upper
                source, select = "lh"[pair], ("0x4140", "0x4342")[i]
            out = f"${2 * i + pair}"
            lines += [f"prmt.b32 {out}, {source}, c, {select}; fma.rn.f16x2 {out}, {out}, s{i}, o{i};"]
    return " ".join(lines) + " }"


@triton.constexpr_function
def _twice(low, high, word):
    """The halves of `word`, each in both halves of a register; the FMA can take them so, it costs no instruction."""
    return f"mov.b32 {{x,y}}, {word}; mov.b32 {low}, {{x,x}}; mov.b32 {high}, {{y,y}};"


@triton.constexpr_function
def _bits(word, source, target, width):
    """Move `width` bits of every byte of $5 from bit `source` to bit `target`, and or them into `word`."""
    mask = f"0x{((1 << width) - 1) << target:02x}" + f"{((1 << width) - 1) << target:02x}" * 3
    move = f"shl.b32 t, $5, {target - source};" if source < target else f"shr.u32 t, $5, {source - target};"
    return f"{move} and.b32 t, t, {mask}; or.b32 {word}, {word}, t;"


@triton.constexpr_function
def _table():
    """Nibbles of $4, in each half two for k and two for k + 32 -> bytes IQ4_VALUES + 128 in l (lower half) and h.

    Four nibbles are a selector of prmt: look them up in both halves of the table, 01 18 2d 3f 4f 5d 6a 76 and
    81 8d 99 a6 b5 c5 d9 f1, and choose by their top bits.
    """
    low, high = "0x3f2d1801, 0x766a5d4f", "0xa6998d81, 0xf1d9c5b5"
    lines = [".reg .b32 t0,t1,t2,t3;"]
    lines += [f"mov.b32 t{i}, {v};" for i, v in enumerate(f"{low}, {high}".split(", "))]
    lines += ["and.b32 t, $4, 0x77777777; shr.u32 c, $4, 1; and.b32 c, c, 0x44444444; or.b32 c, c, 0x32103210;"]
    for i, out in enumerate("lh"):
        if i:
            lines += ["shr.u32 t, t, 16; shr.u32 c, c, 16;"]
        lines += [f"prmt.b32 u, t0, t1, t; prmt.b32 v, t2, t3, t; prmt.b32 {out}, u, v, c;"]
    return " ".join(lines)


@triton.constexpr_function
def _constraints(form):
    """Four early-clobber outputs, then as many inputs as `_decode_asm(form)` reads."""
    return ",".join(["=&r"] * 4 + ["r"] * {4: 9, 5: 10, 6: 6, 8: 6, 14: 5}[form])


@triton.jit
def _half(word, index: tl.constexpr):
    """The index-th fp16 of an integer."""
    return ((word >> (16 * index)) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _table_value(q):
    """IQ4_VALUES[q] + 128 from two 64-bit constants of eight bytes."""
    at = ((q & 7) * 8).to(tl.int64)
    below = (0x766A5D4F3F2D1801 >> at) & 0xFF
    above = (-0x0E263A4A5966727F >> at) & 0xFF
    return tl.where(q < 8, below, above).to(tl.int32)


@triton.jit
def piece(low, h, scales, N, kb, J: tl.constexpr, rn, FORM: tl.constexpr, ASM: tl.constexpr, BN: tl.constexpr):
    """Weights of piece `kb` for the rows `rn` [BN]: fp16 [BN, 32] for k..k+31, and for k+32..k+63.

    `h`: the bytes of `high` that span this piece (AFFINE5, SIGNED6). J = kb modulo the pieces that `h` spans.
    """
    r32 = tl.arange(0, 32)
    if FORM == 8:
        p = tl.load(low + (2 * kb * N + rn)[:, None] * 32 + r32[None, :])
        p2 = tl.load(low + ((2 * kb + 1) * N + rn)[:, None] * 32 + r32[None, :])
    else:
        p = tl.load(low + (kb * N + rn)[:, None] * 32 + r32[None, :])
        p2 = p
    if ASM and FORM == 6:
        # A word of scales for columns 0-15 and one for 16-31, loaded so, not chosen by column: Triton moves the
        # change to the tensor core's layout up to loads, not past a tl.arange: weights would go through shared memory.
        words = scales.to(tl.pointer_type(tl.int32)) + kb * 2 * N
        word = tl.load(words + rn[:, None] * 2 + tl.arange(0, 2)[None, :])
    else:
        s = tl.load(scales + kb * N + rn)
    if ASM:
        asm: tl.constexpr = _decode_asm(FORM, J)
        con: tl.constexpr = _constraints(FORM)
        both: tl.constexpr = (tl.float16, tl.float16)
        if FORM == 6:
            a = tl.reshape(tl.broadcast_to(word[:, :, None], [BN, 2, 16]), [BN, 32])
        else:
            a = tl.broadcast_to(s.to(tl.int32)[:, None], [BN, 32])
        if FORM == 4 or FORM == 5:
            b = tl.broadcast_to((s >> 32).to(tl.int32)[:, None], [BN, 32])
        if FORM == 4:
            lo, hi = tl.inline_asm_elementwise(asm, con, [p, a, b], both, True, 4)
        elif FORM == 5:
            lo, hi = tl.inline_asm_elementwise(asm, con, [p, h, a, b], both, True, 4)
        elif FORM == 6:
            lo, hi = tl.inline_asm_elementwise(asm, con, [p, h, a], both, True, 4)
        elif FORM == 8:
            lo, hi = tl.inline_asm_elementwise(asm, con, [p, p2, a], both, True, 4)
        else:
            lo, hi = tl.inline_asm_elementwise(asm, con, [p, a], both, True, 4)
    else:
        if FORM == 14:
            # of two bytes, the first holds both nibbles of k, the second those of k + 32
            base = low + (kb * N + rn)[:, None] * 32 + (r32 // 2 * 2)[None, :]
            p = (tl.load(base) >> (4 * (r32 % 2))[None, :].to(tl.uint8)) & 15
            p |= (tl.load(base + 1) >> (4 * (r32 % 2))[None, :].to(tl.uint8)) << 4
        lo, hi = _plain(p, p2, h, s, J, r32, FORM)
    return lo, hi


@triton.jit
def _plain(p, p2, h, s, J: tl.constexpr, r32, FORM: tl.constexpr):
    """`piece` without PTX: float32 in between, rounded once to fp16 like the FMA."""
    q_lo = (p & 15).to(tl.int32)
    q_hi = (p >> 4).to(tl.int32)
    if FORM == 8:
        q_lo, q_hi = p.to(tl.int32), p2.to(tl.int32)
    if FORM == 14:
        q_lo, q_hi = _table_value(q_lo), _table_value(q_hi)
    if FORM == 5:
        q_lo = q_lo | (((h >> (2 * J)) & 1).to(tl.int32) << 4)
        q_hi = q_hi | (((h >> (2 * J + 1)) & 1).to(tl.int32) << 4)
    if FORM == 6:
        q_lo = q_lo | (((h >> (4 * (J % 2))) & 3).to(tl.int32) << 4)
        q_hi = q_hi | (((h >> (4 * (J % 2) + 2)) & 3).to(tl.int32) << 4)
    if FORM == 4 or FORM == 5:
        unit = 1.0 / 1048576 if FORM == 4 else 1.0 / 2097152
        scale_lo, offset_lo = _half(s, 0)[:, None].to(tl.float32), _half(s, 1)[:, None].to(tl.float32)
        scale_hi, offset_hi = _half(s, 2)[:, None].to(tl.float32), _half(s, 3)[:, None].to(tl.float32)
    else:
        unit = 1.0 / 4194304 if FORM == 6 else 1.0 / 16777216
        scale_lo, scale_hi = _half(s, 0)[:, None], _half(s, 1)[:, None]
        if FORM == 6:
            scale_lo = tl.where(r32[None, :] < 16, scale_lo, _half(s, 2)[:, None])
            scale_hi = tl.where(r32[None, :] < 16, scale_hi, _half(s, 3)[:, None])
        scale_lo, scale_hi = scale_lo.to(tl.float32), scale_hi.to(tl.float32)
        offset_lo = (scale_lo * (-1.0 / 131072)).to(tl.float16).to(tl.float32)
        offset_hi = (scale_hi * (-1.0 / 131072)).to(tl.float16).to(tl.float32)
    lo = (q_lo.to(tl.float32) * unit * scale_lo + offset_lo).to(tl.float16)
    hi = (q_hi.to(tl.float32) * unit * scale_hi + offset_hi).to(tl.float16)
    return lo, hi


@triton.jit
def tokens(x, k, K, row_ok, factor, MASK_K: tl.constexpr, SCALED: tl.constexpr, ASM: tl.constexpr):
    """fp16 tile [32, BM] of tokens k..k+31, if SCALED times `factor` [BM]. x [1, BM] points to each token's start."""
    r = k + tl.arange(0, 32)[:, None]
    ok = row_ok[None, :] & (r < K) if MASK_K else row_ok[None, :] & (r >= 0)
    v = tl.load(x + r, mask=ok, other=0.0)
    if SCALED:
        v = v.to(tl.float32) * factor[None, :]
    if ASM and v.dtype == tl.bfloat16:
        # two at a time: a bf16 is the upper half of a float32
        return tl.inline_asm_elementwise(
            "{ .reg .b32 l,h; shl.b32 l, $1, 16; and.b32 h, $1, 0xffff0000; cvt.rn.f16x2.f32 $0, h, l; }",
            "=r,r", [v], tl.float16, True, 2,
        )  # fmt: skip
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
        acc = tl.dot(lo, tokens(x, kb * 64, K, row_ok, factor, MASK_K, SCALED, ASM), acc)
        acc = tl.dot(hi, tokens(x, kb * 64 + 32, K, row_ok, factor, MASK_K, SCALED, ASM), acc)
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

    In units of the normalised weights, whose largest is 0.25 to 0.5: tokens of rms 2e-5,
    where fp16 still keeps 10 bits, give outputs around SMALL. NOTHING: also if the first column is all zeros. Else such
    a column is an empty slot or a token of zeros (the rows that pad a CUDA graph's batch), right as it is; or a token
    with nothing above 6e-8, which counts as zero.
    """
    most = tl.max(tl.where(acc == acc, tl.abs(acc), float("inf")), 0)
    fine = ((most >= SMALL) & (most < float("inf"))) | (most == 0.0)
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
