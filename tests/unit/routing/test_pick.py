"""Which pool and tier: a table of cases, and what holds for every request and every state of the pools."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import Forbidden, NotReady
from service.metrics.labels import ROUTING_REASONS
from service.routing.pick import REASONS, Choice, PoolView, Spill, Wish, pick
from service.types import TIERS, PoolName, Tier

FREE: dict[Tier, float] = {"priority": 0.0, "default": 0.0, "flex": 0.0}
BUSY: dict[Tier, float] = {"priority": 2.0, "default": 5.0, "flex": 9.0}
RESERVED: dict[Tier, float] = {"priority": 0.0, "default": 5.0, "flex": 9.0}
UP, FULL, DOWN = PoolView(True, FREE), PoolView(True, BUSY), PoolView(False, FREE, eta_s=30.0)


def two(latency: PoolView = UP, throughput: PoolView = UP) -> dict[PoolName, PoolView]:
    return {"latency": latency, "throughput": throughput}


TABLE: list[tuple[str, Wish, dict[PoolName, PoolView], tuple[str, str, str]]] = [
    ("priority to latency", Wish("priority", None), two(), ("latency", "priority", "tier")),
    ("default to throughput", Wish("default", None), two(), ("throughput", "default", "tier")),
    ("flex to throughput", Wish("flex", None), two(), ("throughput", "flex", "tier")),
    ("auto takes the best that is free", Wish("auto", None), two(), ("latency", "priority", "auto_idle")),
    ("no tier means auto", Wish(None, None), two(), ("latency", "priority", "auto_idle")),
    ("auto, latency busy", Wish("auto", None), two(FULL), ("throughput", "default", "auto_busy")),
    ("auto, latency down", Wish("auto", None), two(DOWN), ("throughput", "default", "auto_busy")),
    ("auto within the key's ceiling", Wish("auto", None, "flex"), two(), ("throughput", "flex", "auto_busy")),
    ("priority spills", Wish("priority", None), two(FULL), ("throughput", "priority", "spill")),
    ("not where it would wait as well", Wish("priority", None), two(FULL, FULL), ("latency", "priority", "tier")),
    ("flex does not spill by default", Wish("flex", None), two(UP, FULL), ("throughput", "flex", "tier")),
    ("a mode is obeyed", Wish("flex", "latency"), two(), ("latency", "flex", "mode")),
    ("throughput and no tier: no priority", Wish(None, "throughput"), two(), ("throughput", "default", "mode")),
    ("latency and no tier: auto", Wish(None, "latency"), two(FULL), ("latency", "default", "mode")),
    ("a mode does not spill", Wish("priority", "latency"), two(FULL), ("latency", "priority", "mode")),
    ("the pool is down", Wish("priority", None), two(DOWN), ("throughput", "priority", "pool_down")),
    ("the mode's pool is down", Wish("flex", "throughput"), two(UP, DOWN), ("latency", "flex", "pool_down")),
    ("one pool", Wish("priority", None), {"shared": UP}, ("shared", "priority", "only_pool")),
    ("one pool, auto", Wish(None, None), {"shared": UP}, ("shared", "priority", "auto_idle")),
    (
        "one pool, reserved slot free",
        Wish(None, None),
        {"shared": PoolView(True, RESERVED)},
        ("shared", "priority", "auto_idle"),
    ),
    ("one pool, busy", Wish(None, None), {"shared": FULL}, ("shared", "default", "auto_busy")),
    ("one pool, a mode", Wish("flex", "latency"), {"shared": UP}, ("shared", "flex", "only_pool")),
]


@pytest.mark.parametrize(("wish", "pools", "got"), [pytest.param(*row[1:], id=row[0]) for row in TABLE])
def test_table(wish: Wish, pools: dict[PoolName, PoolView], got: tuple[str, str, str]) -> None:
    assert pick(wish, pools, Spill()) == Choice(*got)  # type: ignore[arg-type]


def test_flex_may_spill_where_the_profile_says_so() -> None:
    allowed = Spill(to_throughput=False, to_latency=True)
    assert pick(Wish("flex", None), two(UP, FULL), allowed) == Choice("latency", "flex", "spill")
    assert pick(Wish("priority", None), two(FULL, UP), allowed).pool == "latency"


def test_auto_goes_where_it_is_promised_to_be_served_first() -> None:
    shorter = PoolView(True, {"priority": 1.0, "default": 3.0, "flex": 3.0})
    allowed = Spill(to_latency=True)
    assert pick(Wish("auto", None), two(shorter, FULL), allowed) == Choice("latency", "default", "spill")
    assert pick(Wish("default", None), two(shorter, FULL), allowed).pool == "throughput"
    assert pick(Wish("auto", None), two(shorter, FULL), Spill()).pool == "throughput"


def test_nothing_ready_says_when() -> None:
    with pytest.raises(NotReady) as refused:
        pick(Wish(None, None), two(DOWN, PoolView(False, FREE, eta_s=12.0)), Spill())
    assert refused.value.retry_after_s == 12.0
    with pytest.raises(NotReady) as refused:
        pick(Wish(None, None), {"shared": PoolView(False, FREE)}, Spill())
    assert refused.value.retry_after_s == 5.0


def test_above_the_ceiling_is_refused_not_lowered() -> None:
    with pytest.raises(Forbidden):
        pick(Wish("priority", None, "default"), two(), Spill())
    assert pick(Wish("flex", None, "default"), two(), Spill()).tier == "flex", "less than allowed is allowed"


views = st.builds(
    lambda ready, waits, eta: PoolView(ready, dict(zip(TIERS, sorted(waits), strict=True)), eta),
    st.booleans(),
    st.lists(st.sampled_from([0.0, 0.5, 30.0]), min_size=3, max_size=3),
    st.none() | st.floats(0, 1000),
)
wishes = st.builds(
    Wish,
    st.sampled_from([None, "auto", *TIERS]),
    st.sampled_from([None, "latency", "throughput"]),
    st.sampled_from(TIERS),
)
spills = st.builds(Spill, st.booleans(), st.booleans())
layouts: Any = st.one_of(
    st.fixed_dictionaries({"shared": views}), st.fixed_dictionaries({"latency": views, "throughput": views})
)


@given(wishes, layouts, spills)
def test_whatever_is_asked(wish: Wish, pools: dict[PoolName, PoolView], spill: Spill) -> None:
    try:
        choice = pick(wish, pools, spill)
    except NotReady as refused:
        assert not any(view.ready for view in pools.values())
        assert refused.retry_after_s is not None and refused.retry_after_s >= 1.0
        return
    except Forbidden:
        assert wish.tier in TIERS and TIERS.index(wish.tier) < TIERS.index(wish.ceiling)
        return
    assert pools[choice.pool].ready, "never a pool that cannot serve"
    assert TIERS.index(choice.tier) >= TIERS.index(wish.ceiling), "never above the ceiling"
    if wish.tier in TIERS:
        assert choice.tier == wish.tier, "an explicit tier is kept"
    if choice.reason == "spill":
        (left,) = [view for name, view in pools.items() if name != choice.pool]
        wait, other = pools[choice.pool].wait_s[choice.tier], left.wait_s[choice.tier]
        assert wait < other, "never into a longer queue"
        assert wait == 0.0 or wish.tier in (None, "auto"), "an explicit tier never from one queue into another"
        assert wish.mode is None
    if wish.mode in pools and pools[wish.mode].ready:
        assert choice.pool == wish.mode, "a mode is obeyed"


def test_reasons_are_labels() -> None:
    assert set(REASONS) <= set(ROUTING_REASONS)
