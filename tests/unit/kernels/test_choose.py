"""Tables and rules give tiles that the launchers accept, for any shape and number of tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.engines.vllm.kernels import choose
from service.engines.vllm.kernels.choose import LinearTile, MoeTile, Table
from service.engines.vllm.kernels.linear import COUNTERS, unit
from service.engines.vllm.kernels.repack import UNIT

TILE = LinearTile(64, 8, 2, 2, 3)
SHIPPED = sorted(choose.TUNED.glob("*.json"))


def accepted(tile: LinearTile, rows: int, units: int, m: int) -> bool:
    tiles = rows // tile.bn * -(-m // tile.bm)
    return rows % tile.bn == 0 and units % tile.split == 0 and (tile.split == 1 or tiles <= COUNTERS)


@given(form=st.sampled_from(sorted(UNIT)), rows=st.integers(1, 400), pieces=st.integers(1, 60), m=st.integers(1, 9000))
def test_the_rule_for_linears(form: int, rows: int, pieces: int, m: int) -> None:
    rows, pieces = rows * 64, pieces * UNIT[form]
    step = unit(form, pieces)
    tile = choose.linear_tile(Table(), form, rows, pieces, step, m)
    decoded = (m > choose.GRAPHS and rows * pieces * 64 > choose.FEW) or choose.MANY < m <= choose.GRAPHS
    assert tile is None if decoded else tile is not None and accepted(tile, rows, pieces // step, m)


@given(
    inner=st.integers(1, 40), hidden=st.integers(1, 40), experts=st.sampled_from([1, 8, 60, 256, 384]),
    top_k=st.integers(1, 9), m=st.integers(1, 3000),
)  # fmt: skip
def test_the_rule_for_experts(inner: int, hidden: int, experts: int, top_k: int, m: int) -> None:
    inner, hidden = inner * 32, hidden * 64
    units = hidden // 64 // unit(4, hidden // 64)
    tile = choose.moe_tile(Table(), (4, 5), experts, inner, hidden, m, top_k, units)
    w13_rows = -(-2 * inner // 64) * 64
    assert accepted(tile.w13, w13_rows, units, m)
    assert hidden % (tile.w2.bn * tile.loop) == 0
    if tile.grouped:
        assert tile.w13.bm == tile.w2.bm and tile.w13.split == tile.w2.split == 1
    else:
        assert tile.w13.split == 1 or w13_rows // tile.w13.bn * m * top_k <= COUNTERS - 4


def test_the_entry_for_a_little_more_work_is_taken() -> None:
    table = Table("x", 1, {"4:64x64": {1: TILE, 16: None, 64: LinearTile(64, 64, 1, 4, 2)}})
    assert choose.linear_tile(table, 4, 64, 1, 1, 1) == TILE
    assert choose.linear_tile(table, 4, 64, 1, 1, 2) is None
    assert choose.linear_tile(table, 4, 64, 1, 1, 17) == LinearTile(64, 64, 1, 4, 2)


def test_beyond_the_last_entry_many_tokens_are_decoded_once() -> None:
    table = Table("x", 1, {"4:64x64": {1: TILE, 64: TILE}, "4:2048x2048": {1: TILE, 64: TILE}})
    assert choose.linear_tile(table, 4, 64, 1, 1, 65) == TILE
    assert choose.linear_tile(table, 4, 2048, 32, 4, 4096) is None
    assert choose.linear_tile(table, 4, 64, 1, 1, 4096) is not None, "few weights: one launch instead of four"


def test_tables_survive_being_written() -> None:
    moe = MoeTile(True, TILE, LinearTile(128, 8, 1, 4, 2), 4)
    table = Table("a GPU", 7, {"4:64x64": {1: TILE, 256: None}}, {"4/5:1x2x3": {4: moe}})
    text = choose.dump(table, {"torch": "1"})
    assert choose.parse(text) == table
    assert "[64, 8, 2, 2, 3]" in text


@pytest.mark.parametrize("path", SHIPPED, ids=[p.stem for p in SHIPPED])
def test_shipped_tables_fit_their_shapes(path: object) -> None:
    table = choose.parse(path.read_text())  # type: ignore[attr-defined]
    assert choose.slug(table.device) == path.stem  # type: ignore[attr-defined]
    for key, entries in table.linear.items():
        form, shape = key.split(":")
        n, k = (int(p) for p in shape.split("x"))
        for m, tile in entries.items():
            assert tile is None or accepted(tile, n, k // 64 // unit(int(form), k // 64), m), (key, m)
    for key, found in table.moe.items():
        _, inner, hidden = (int(p) for p in key.split(":")[1].split("x"))
        for m, moe in found.items():
            assert accepted(moe.w13, 2 * inner, hidden // 256, m) and hidden % (moe.w2.bn * moe.loop) == 0, (key, m)
            assert not moe.grouped or moe.w13.bm == moe.w2.bm
    assert SHIPPED
