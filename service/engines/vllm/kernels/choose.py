"""Which tile sizes for which product, shape and number of tokens: measured tables, and a rule where none fits.

A table is JSON in tuned/, one a GPU model, written by `tune.py`. Its entries are measured at some M; a product with M
tokens takes the entry of the smallest measured M that is not smaller (the tile that was best for a little more work).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TypeVar

MANY = 128
"""Tokens beyond which, unless measured otherwise, W is decoded once for cuBLAS."""

GRAPHS = 512
"""Tokens up to which vLLM records a step as CUDA graphs: beyond, the host pays for each launch as well."""

FEW = 1 << 21
"""Weights up to which decoding does not pay there: it is four launches, and as quick as one kernel on an H200."""

LINEAR_M = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
MOE_M = (*LINEAR_M, 2048)
"""Numbers of tokens that a table is measured at, for linears and for experts."""

T = TypeVar("T")

TUNED = Path(__file__).parent / "tuned"


@dataclass(frozen=True)
class LinearTile:
    """One launch of linear_kernel: BN rows of W by BM tokens a program, K split `split` ways."""

    bn: int
    bm: int
    split: int
    warps: int
    stages: int


@dataclass(frozen=True)
class MoeTile:
    """How the two expert products run. `grouped`: tokens are sorted by expert first; else a program a (token, expert).

    `w13`, `w2` as LinearTile; w2's split is over a token's experts. In grouped mode both have one `bm` and no split.
    `loop`: n blocks a w2 program does.
    `early`: not grouped, on sm_90 or later: w13 is launched while the kernel before it ends, w2 while w13 runs, and w2
    fetches its weights meanwhile.
    """

    grouped: bool
    w13: LinearTile
    w2: LinearTile
    loop: int = 1
    early: bool = False


@dataclass(frozen=True)
class Table:
    """`linear`: "form:NxK" -> {M: tile or None (prefill path)}. `moe`: "f13/f2:ExIxH" -> {M: tile}. Sizes as stored."""

    device: str = "none"
    processors: int = 132
    linear: dict[str, dict[int, LinearTile | None]] = field(default_factory=dict)
    moe: dict[str, dict[int, MoeTile]] = field(default_factory=dict)


def linear_key(form: int, n: int, k: int) -> str:
    return f"{form}:{n}x{k}"


def moe_key(form13: int, form2: int, experts: int, inner: int, hidden: int) -> str:
    return f"{form13}/{form2}:{experts}x{inner}x{hidden}"


def linear_tile(table: Table, form: int, rows: int, pieces: int, unit: int, m: int) -> LinearTile | None:
    """The tile for x [m, pieces * 64] times W [rows, ...] of `form`; None means decode once and use cuBLAS."""
    found = _at_least(table.linear.get(linear_key(form, rows, pieces * 64)), m)
    if found is not None and (m <= MANY or m <= max(table.linear[linear_key(form, rows, pieces * 64)])):
        return found[0]
    if MANY < m <= GRAPHS or (m > GRAPHS and rows * pieces * 64 > FEW):
        return None
    enough, many = 1.4 * table.processors, rows // 64 * -(-m // 64)
    bm = 8 if m <= 8 else 64 if m > 32 and many >= enough else 16 if m <= 64 else 32 if m <= MANY else 64
    bn = 32 if m <= 8 else 64
    tiles, units = rows // bn * -(-m // bm), pieces // unit
    splits = [s for s in range(1, 17) if units % s == 0] if tiles <= 4096 else [1]
    split = min(splits, key=lambda s: max(tiles * s / enough, enough / (tiles * s)))
    # bigger tiles with three stages need more shared memory than an RTX PRO 6000 has (`glm5 tune resources`)
    small = bn * bm <= 64 * 16
    return LinearTile(bn, bm, split, 2 if small else 4, 3 if small else 2)


def moe_tile(
    table: Table, forms: tuple[int, int], experts: int, inner: int, hidden: int, m: int, top_k: int, units: int
) -> MoeTile:
    """The tiles for m tokens with `top_k` of `experts` experts of width `inner` (per rank). `units`: of w13's K."""
    found = _at_least(table.moe.get(moe_key(*forms, experts, inner, hidden)), m)
    if found is not None:
        return found[0]
    wide = 64
    if m * top_k <= 128:
        split = 1
        while 2 * inner // wide * m * top_k * split < 2 * table.processors and units % (split * 2) == 0 and split < 8:
            split *= 2
        return MoeTile(False, LinearTile(wide, 8, split, 2, 3), LinearTile(32, 8, 1, 2, 2))
    each = m * top_k / experts
    bm = 8 if each <= 4 else 16 if each <= 12 else 32 if each <= 24 else 64
    tile = LinearTile(wide, bm, 1, 2 if bm <= 16 else 4, 3)
    return MoeTile(True, tile, tile)


def _at_least(entries: dict[int, T] | None, m: int) -> tuple[T] | None:
    """The entry of the least measured M >= m; past the largest, the largest (None in a 1-tuple is a choice too)."""
    if not entries:
        return None
    return (entries[min((k for k in entries if k >= m), default=max(entries))],)


def dump(table: Table, versions: dict[str, str]) -> str:
    """JSON that `parse` reads; one line a tile, so that a new tuning run gives a readable diff."""

    def tile(t: LinearTile) -> list[int]:
        return [t.bn, t.bm, t.split, t.warps, t.stages]

    linear = {
        k: {str(m): None if t is None else tile(t) for m, t in sorted(v.items())}
        for k, v in sorted(table.linear.items())
    }
    moe = {
        k: {
            str(m): {"grouped": t.grouped, "w13": tile(t.w13), "w2": tile(t.w2), "loop": t.loop}
            | ({"early": True} if t.early else {})
            for m, t in sorted(v.items())
        }
        for k, v in sorted(table.moe.items())
    }
    head = {"device": table.device, "processors": table.processors, "versions": versions}
    text = json.dumps({**head, "linear": linear, "moe": moe}, indent=1)
    return _join_number_lists(text) + "\n"


def _join_number_lists(text: str) -> str:
    """[\\n 64,\\n 8 ...] -> [64, 8, ...]"""
    out, rest = "", text
    while "[" in rest:
        head, rest = rest.split("[", 1)
        body, rest = rest.split("]", 1)
        out += head + "[" + ", ".join(p.strip() for p in body.split(",")) + "]"
    return out + rest


def parse(text: str) -> Table:
    data = json.loads(text)
    linear = {
        k: {int(m): None if t is None else LinearTile(*t) for m, t in v.items()} for k, v in data["linear"].items()
    }
    moe = {
        k: {
            int(m): MoeTile(t["grouped"], LinearTile(*t["w13"]), LinearTile(*t["w2"]), t["loop"], t.get("early", False))
            for m, t in v.items()
        }
        for k, v in data["moe"].items()
    }
    return Table(data["device"], data["processors"], linear, moe)


@cache
def table_for(device: str, processors: int) -> Table:
    """The shipped table of this GPU model (name as CUDA gives it), else an empty one (the rules decide)."""
    path = TUNED / f"{slug(device)}.json"
    return parse(path.read_text()) if path.is_file() else Table(device, processors)


def slug(device: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in device.lower()).strip("-")
