from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.metrics.labels import CONVERSION_REASONS
from service.scaling.conversion import LEAST_RETURN, Memory, Mode, Seen, Why, judge


def rate(mode: Mode, requests: int) -> float:
    """The reference box before and after CUDA graphs, roughly: graphs double one user, and cost at ten."""
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
        assert verdict.gain_tokens >= LEAST_RETURN * verdict.cost_tokens
        back = judge(verdict.mode, demand, rate, reload_s=reload_s, since_reload_s=1e9)
        assert not back.convert, "the same demand wants both modes"


def test_reasons_are_labels() -> None:
    assert set(get_args(Why)) <= set(CONVERSION_REASONS)


def test_memory_keeps_its_window() -> None:
    memory = Memory(window_s=10.0)
    for requests, seconds in ((1, 4.0), (1, 4.0), (5, 4.0)):
        memory.add(requests, seconds)
    assert memory.seen == (Seen(1, 6.0), Seen(5, 4.0))
