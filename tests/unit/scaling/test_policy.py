"""The scaling policy: a table of situations, and what holds in every situation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.metrics.labels import SCALING_REASONS
from service.scaling.policy import Decision, Memory, Reading, Reason, Rules, decide
from service.types import PoolName


@dataclass(frozen=True)
class Knobs:
    budget: float | None = 4
    priority_wait_s: float = 1.0
    batch_wait_s: float = 60.0
    down_after_s: float = 60.0
    start_s: float = 100.0


RULES: dict[PoolName, Rules] = {"latency": Rules(1, 3, slots=4), "throughput": Rules(1, 3, slots=100)}
IDLE = Reading(target=1, ready=1, alive=1)


def once(latency: Reading, throughput: Reading, *, budget: float | None = 4, lasting_s: float = 0.0) -> Decision:
    """The decision when these readings have been the same for `lasting_s`."""
    memory, now, knobs = Memory(), 0.0, Knobs(budget)
    readings: dict[PoolName, Reading] = {"latency": latency, "throughput": throughput}
    decision = decide(RULES, readings, knobs, memory, now)
    if lasting_s:
        decision = decide(RULES, readings, knobs, decision.memory, lasting_s)
    return decision


def busy(target: int = 1, **rest: Any) -> Reading:
    return Reading(**{"target": target, "ready": target, "alive": target, "running": 4 * target, **rest})


STARVED = busy(waiting=8, priority_wait_s=3.0)
BATCH = Reading(target=3, ready=3, alive=3, running=300, waiting=900, queued_tokens=1e6, tokens_per_s=1000.0)

TABLE: list[tuple[str, Reading, Reading, dict[str, Any], tuple[int, int], tuple[str, str]]] = [
    ("nothing to do", IDLE, IDLE, {}, (1, 1), ("steady", "steady")),
    ("priority waits, boxes free", STARVED, IDLE, {}, (2, 1), ("wait", "steady")),
    ("a short wait is no reason", busy(waiting=2, priority_wait_s=0.5), IDLE, {}, (1, 1), ("steady", "steady")),
    (
        "what loads is counted",
        busy(waiting=4, priority_wait_s=9.0, target=2, ready=1, alive=2, running=4),
        IDLE,
        {},
        (2, 1),
        ("steady", "steady"),
    ),
    ("no free box, wait just seen", STARVED, BATCH, {}, (1, 3), ("budget", "maximum")),
    ("no free box, wait lasts", STARVED, BATCH, {"lasting_s": 11.0}, (1, 2), ("budget", "rebalance")),
    (
        "the box is on its way",
        STARVED,
        replace(BATCH, target=2, ready=2, alive=2, draining=1),
        {"lasting_s": 50.0},
        (1, 2),
        ("budget", "budget"),
    ),
    (
        "the box is there",
        STARVED,
        replace(BATCH, target=2, ready=2, alive=2),
        {"lasting_s": 50.0},
        (2, 2),
        ("wait", "budget"),
    ),
    (
        "never below the other's floor",
        STARVED,
        replace(BATCH, target=1, ready=1, alive=1),
        {"budget": 2, "lasting_s": 50.0},
        (1, 1),
        ("budget", "budget"),
    ),
    (
        "batch takes free boxes only",
        busy(),
        replace(BATCH, target=1, ready=1, alive=1),
        {},
        (1, 2),
        ("steady", "tokens_queued"),
    ),
    (
        "batch takes nothing from priority",
        busy(3),
        replace(BATCH, target=1, ready=1, alive=1),
        {"lasting_s": 500.0},
        (3, 1),
        ("steady", "budget"),
    ),
    (
        "a backlog that ends soon",
        busy(),
        replace(BATCH, target=1, ready=1, alive=1, queued_tokens=5e4),
        {},
        (1, 1),
        ("steady", "steady"),
    ),
    ("idle, but not for long", busy(3, running=1), IDLE, {"lasting_s": 61.0}, (3, 1), ("cooldown", "steady")),
    ("idle for a start time", busy(3, running=1), IDLE, {"lasting_s": 101.0}, (2, 1), ("idle", "steady")),
    (
        "idle while batch starves",
        busy(3, running=1),
        replace(BATCH, target=1, ready=1, alive=1),
        {"lasting_s": 61.0},
        (2, 1),
        ("idle", "budget"),
    ),
    (
        "idle, start measured",
        busy(3, running=1, start_s=300.0),
        IDLE,
        {"lasting_s": 299.0},
        (3, 1),
        ("cooldown", "steady"),
    ),
    (
        "what is left would be 70 % full",
        IDLE,
        Reading(2, 2, 2, running=70),
        {"lasting_s": 101.0},
        (1, 1),
        ("steady", "idle"),
    ),
    (
        "what is left would be 71 % full",
        IDLE,
        Reading(2, 2, 2, running=71),
        {"lasting_s": 101.0},
        (1, 2),
        ("steady", "steady"),
    ),
    (
        "idle, but requests are missed",
        busy(3, running=1, missed=1),
        IDLE,
        {"lasting_s": 900.0},
        (3, 1),
        ("steady", "steady"),
    ),
    ("below the floor", Reading(0, 0), IDLE, {}, (1, 1), ("minimum", "steady")),
    ("above the ceiling", IDLE, Reading(5, 5, 5), {"budget": None}, (1, 3), ("steady", "maximum")),
    ("loading looks idle", Reading(2, 0, 2), IDLE, {"lasting_s": 900.0}, (2, 1), ("no_data", "steady")),
    (
        "draining holds its box",
        STARVED,
        Reading(1, 1, 1, draining=2),
        {"lasting_s": 50.0},
        (1, 1),
        ("budget", "steady"),
    ),
]


@pytest.mark.parametrize(
    ("latency", "throughput", "how", "targets", "reasons"), [pytest.param(*row[1:], id=row[0]) for row in TABLE]
)
def test_table(
    latency: Reading, throughput: Reading, how: dict[str, Any], targets: tuple[int, int], reasons: tuple[Reason, Reason]
) -> None:
    decision = once(latency, throughput, **how)
    assert (decision.targets["latency"], decision.targets["throughput"]) == targets
    assert (decision.reasons["latency"], decision.reasons["throughput"]) == reasons


def test_from_zero_and_back() -> None:
    rules: dict[PoolName, Rules] = {"latency": Rules(0, 2, slots=4), "throughput": Rules(1, 2, slots=100)}
    knobs = Knobs(budget=3)
    asleep = Reading(target=0, ready=0)
    decision = decide(rules, {"latency": asleep, "throughput": IDLE}, knobs, Memory(), 0.0)
    assert decision.targets["latency"] == 0
    decision = decide(rules, {"latency": replace(asleep, missed=1), "throughput": IDLE}, knobs, decision.memory, 1.0)
    assert decision.targets["latency"] == 1 and decision.reasons["latency"] == "queue"
    loading = Reading(target=1, ready=0, alive=1)
    decision = decide(rules, {"latency": loading, "throughput": IDLE}, knobs, decision.memory, 50.0)
    assert decision.targets["latency"] == 1, "one that loads looks idle, and must not be given up for it"
    for now, wanted in ((60.0, 1), (159.0, 1), (161.0, 0)):
        decision = decide(rules, {"latency": IDLE, "throughput": IDLE}, knobs, decision.memory, now)
        assert decision.targets["latency"] == wanted, now


def test_reasons_are_labels() -> None:
    from typing import get_args

    assert set(get_args(Reason)) <= set(SCALING_REASONS)


def readings(ceiling: int) -> st.SearchStrategy[Reading]:
    def make(target: int, gone: int, ready: int, draining: int, load: tuple[int, int, int], rest: Any) -> Reading:
        alive = max(0, target - gone)
        wait, tokens, rate, start = rest
        running, waiting, missed = load
        return Reading(
            target,
            min(ready, alive),
            alive,
            draining,
            running,
            waiting,
            missed,
            wait,
            tokens if waiting else 0.0,
            rate,
            start,
        )

    small, amount = st.integers(0, ceiling), st.integers(0, 2000)
    rest = st.tuples(
        st.floats(0, 100), st.floats(0, 1e7), st.none() | st.floats(0, 5000), st.none() | st.floats(0, 1000)
    )
    return st.builds(make, small, small, small, st.integers(0, 3), st.tuples(amount, amount, amount), rest)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(readings(8), readings(8), st.floats(0.1, 400)), min_size=1, max_size=6),
    st.integers(0, 2),
    st.integers(0, 2),
    st.integers(2, 24),
    st.sampled_from([1.0, 2.0]),
)
def test_whatever_happens(
    history: list[tuple[Reading, Reading, float]], floor_l: int, floor_t: int, budget: int, boxes: float
) -> None:
    """Any sequence of readings: bounds are kept, boxes are never promised twice, and nobody is robbed."""
    rules: dict[PoolName, Rules] = {
        "latency": Rules(floor_l, 8, slots=4, boxes=boxes),
        "throughput": Rules(floor_t, 8, slots=64),
    }
    knobs, memory, now = Knobs(budget), Memory(), 0.0
    for latency, throughput, pause in history:
        now += pause
        seen: dict[PoolName, Reading] = {"latency": latency, "throughput": throughput}
        decision = decide(rules, seen, knobs, memory, now)
        assert decision == decide(rules, seen, knobs, memory, now), "pure"
        memory = decision.memory
        for name, rule in rules.items():
            before, after = seen[name].target, decision.targets[name]
            assert min(before, rule.floor) <= after <= max(before, rule.ceiling)
            if before >= rule.floor:
                assert after >= rule.floor
            if before <= rule.ceiling:
                assert after <= rule.ceiling
            if after < before and decision.reasons[name] in ("idle", "rebalance"):
                assert seen[name].ready > 0 or decision.reasons[name] == "rebalance"
        grown = [name for name in rules if decision.targets[name] > seen[name].target]
        held = sum(
            rules[n].boxes * (max(decision.targets[n], seen[n].target, seen[n].alive) + seen[n].draining) for n in rules
        )
        if grown:
            assert held <= budget + 1e-9, "a box was promised that somebody still holds"
        if decision.reasons["latency"] == "rebalance":
            raise AssertionError("batch never takes from priority")


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 200), st.integers(0, 3000), st.floats(1, 300))
def test_constant_load_settles(chat: int, batch: int, start_s: float) -> None:
    """Under a constant load targets stop moving: no flapping, from any load."""
    rules: dict[PoolName, Rules] = {"latency": Rules(1, 15, slots=4), "throughput": Rules(1, 15, slots=64)}
    knobs, memory = Knobs(16, start_s=start_s), Memory()
    targets: dict[PoolName, int] = {"latency": 1, "throughput": 1}
    changes: list[float] = []
    horizon = 40 * max(60.0, start_s)
    for step in range(200):
        now = step * horizon / 200
        slots = {name: targets[name] * rules[name].slots for name in targets}
        seen: dict[PoolName, Reading] = {}
        for name, load in (("latency", chat), ("throughput", batch)):
            assert name in ("latency", "throughput")
            waiting = max(0, load - slots[name])  # type: ignore[index]
            seen[name] = Reading(  # type: ignore[index]
                targets[name],  # type: ignore[index]
                targets[name],  # type: ignore[index]
                targets[name],  # type: ignore[index]
                running=load - waiting,
                waiting=waiting,
                priority_wait_s=10.0 if waiting and name == "latency" else 0.0,
                queued_tokens=500.0 * waiting if name == "throughput" else 0.0,
            )
        decision = decide(rules, seen, knobs, memory, now)
        memory = decision.memory
        if dict(decision.targets) != targets:
            changes.append(now)
        targets = dict(decision.targets)
    assert all(at < 0.9 * horizon for at in changes), (changes[-5:], targets)
    assert targets["latency"] >= min(15, -(-chat // 4)), "priority got what it needs"
