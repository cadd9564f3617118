from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.metrics.labels import CONVERSION_REASONS
from service.scaling.conversion import Memory, Mode, Seen, Why, judge


def rate(mode: Mode, requests: int) -> float:
    """Two lines that cross, for the rules alone. With the step model: tests/unit/deployments/test_conversion.py."""
    alone, full = (43.0, 300.0) if mode == "latency" else (20.0, 1000.0)
    return min(full, alone * requests)


TABLE: list[tuple[str, Mode, list[Seen], dict[str, float], bool, Why]] = [
    ("many users for an hour", "latency", [Seen(200, 3600)], {}, True, "gain_pays"),
    ("many users for a minute", "latency", [Seen(200, 60)], {}, False, "reload_too_dear"),
    ("one user for an hour", "throughput", [Seen(1, 3600)], {}, True, "gain_pays"),
    ("one user, right mode", "latency", [Seen(1, 3600)], {}, False, "gain_too_small"),
    ("nobody", "latency", [Seen(0, 3600)], {}, False, "no_demand"),
    ("just reloaded", "latency", [Seen(200, 3600)], {"since_reload_s": 600.0}, False, "cooldown"),
    ("a priority answer runs", "latency", [Seen(200, 3600)], {"priority_running": 1}, False, "busy"),
]


@pytest.mark.parametrize(("mode", "demand", "how", "convert", "why"), [pytest.param(*r[1:], id=r[0]) for r in TABLE])
def test_table(mode: Mode, demand: list[Seen], how: dict[str, float], convert: bool, why: Why) -> None:
    known = {"reload_s": 300.0, "since_reload_s": 1e6, **how}
    verdict = judge(mode, demand, rate, **known)  # type: ignore[arg-type]
    assert (verdict.convert, verdict.why) == (convert, why)
    assert why in str(verdict)


@given(
    st.sampled_from(["latency", "throughput"]),
    st.lists(st.builds(Seen, st.integers(0, 300), st.floats(0, 5000)), max_size=5),
    st.floats(1, 2000),
)
def test_never_at_a_loss_and_never_there_and_back(mode: Mode, demand: list[Seen], reload_s: float) -> None:
    verdict = judge(mode, demand, rate, reload_s=reload_s, since_reload_s=1e9)
    if verdict.convert:
        assert verdict.gain_tokens >= 2.0 * verdict.cost_tokens
        back = judge(verdict.mode, demand, rate, reload_s=reload_s, since_reload_s=1e9)
        assert not back.convert, "the same demand wants both modes"


def why(here: float, there: float, *, lasted_s: float, since_reload_s: float = 1e6) -> Why:
    """The verdict on a throughput replica that makes `here` tokens a second and would make `there`; reload 100 s."""
    rates = {"throughput": here, "latency": there}
    demand = [Seen(1, lasted_s)]
    return judge("throughput", demand, lambda mode, _: rates[mode], reload_s=100.0, since_reload_s=since_reload_s).why


def test_fifteen_percent_more_are_needed() -> None:
    assert why(100.0, 114.0, lasted_s=1e6) == "gain_too_small"
    assert why(100.0, 116.0, lasted_s=1e6) == "gain_pays"


def test_a_reload_must_bring_twice_what_it_costs() -> None:
    """100 tok/s for 100 s are lost; 100 tok/s more are won from then on, for as long again as it lasted."""
    assert why(100.0, 200.0, lasted_s=299.0) == "reload_too_dear"
    assert why(100.0, 200.0, lasted_s=301.0) == "gain_pays"


def test_ten_reload_times_lie_between_two() -> None:
    assert why(100.0, 200.0, lasted_s=1e6, since_reload_s=999.0) == "cooldown"
    assert why(100.0, 200.0, lasted_s=1e6, since_reload_s=1001.0) == "gain_pays"


def test_reasons_are_labels() -> None:
    assert set(get_args(Why)) <= set(CONVERSION_REASONS)


def test_memory_keeps_its_window() -> None:
    memory = Memory(window_s=10.0)
    for requests, seconds in ((1, 4.0), (1, 4.0), (5, 4.0)):
        memory.add(requests, seconds)
    assert memory.seen == (Seen(1, 6.0), Seen(5, 4.0))
