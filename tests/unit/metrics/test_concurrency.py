"""The core pair: seconds and tokens by concurrency are exact, whatever starts and ends when."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.metrics.concurrency import LOG_ENTRIES
from service.metrics.declared import Metrics
from service.metrics.labels import CONCURRENCY, concurrency_index
from service.metrics.recorders import ReplicaRecorder, RequestMeter
from service.types import Delta
from tests.unit.metrics.read import Clock, by, read, total

TOKENS, BUSY = "glm_output_tokens_by_concurrency_total", "glm_busy_seconds_by_concurrency_total"


def bounds(bucket: str) -> tuple[int, float]:
    if bucket.endswith("+"):
        return int(bucket[:-1]), float("inf")
    low, _, high = bucket.partition("-")
    return int(low), int(high or low)


@pytest.mark.parametrize("n", [*range(1, 70), 127, 128, 129, 256, 257, 512, 513, 1024, 1025, 5000])
def test_a_number_falls_into_the_bucket_whose_name_holds_it(n: int) -> None:
    low, high = bounds(CONCURRENCY[concurrency_index(n)])
    assert low <= n <= high


def test_buckets_touch_and_do_not_overlap() -> None:
    edges = [bounds(bucket) for bucket in CONCURRENCY]
    assert edges[0][0] == 1
    assert all(b[0] == a[1] + 1 for a, b in pairwise(edges))


def test_two_requests_that_overlap() -> None:
    """First alone for 2 s, both for 3 s, second alone for 1 s. Prefill (before a first token) is not decoding."""
    clock, metrics = Clock(), Metrics()
    replica = ReplicaRecorder(metrics, "shared", 4, clock)
    first, second = replica.request("default").__enter__(), replica.request("priority").__enter__()
    clock.pass_(5)
    first.chunk(Delta(output_tokens=1))
    clock.pass_(2)
    second.chunk(Delta(output_tokens=2))
    clock.pass_(3)
    first.chunk(Delta(output_tokens=9))  # with its first one: 10 tokens over 2 s alone and 3 s together
    first.__exit__(None, None, None)
    clock.pass_(1)
    second.chunk(Delta(output_tokens=6))  # with its first two: 8 tokens over 3 s together and 1 s alone
    second.__exit__(None, None, None)
    clock.pass_(50)
    found = read(metrics)
    assert by(found, BUSY, "concurrency") == {"1": 3.0, "2": 3.0}
    assert by(found, TOKENS, "concurrency") == {"1": 4.0 + 2.0, "2": 6.0 + 6.0}
    assert by(found, "glm_output_tokens_total", "tier") == {"default": 10.0, "priority": 8.0}


def test_requests_that_start_and_end_together_are_all_booked_under_their_number() -> None:
    """No stray first or last token under 1, where it would stand for a speed that never was."""
    clock, metrics = Clock(), Metrics()
    replica = ReplicaRecorder(metrics, "shared", 8, clock)
    meters = [replica.request("default").__enter__() for _ in range(8)]
    for _ in range(51):
        for meter in meters:
            meter.chunk(Delta(output_tokens=1))
        clock.pass_(0.1)
    for meter in meters:
        meter.__exit__(None, None, None)
    found = read(metrics)
    assert by(found, TOKENS, "concurrency") == pytest.approx({"5-8": 8 * 51})
    assert by(found, BUSY, "concurrency") == pytest.approx({"5-8": 5.1})


def test_an_answer_of_one_token_is_booked_when_it_ends() -> None:
    clock, metrics = Clock(), Metrics()
    with ReplicaRecorder(metrics, "shared", 8, clock).request("default") as request:
        request.chunk(Delta(output_tokens=1))
    assert by(read(metrics), TOKENS, "concurrency") == {"1": 1.0}


def test_busy_time_is_current_while_nothing_changes() -> None:
    clock, metrics = Clock(), Metrics()
    with ReplicaRecorder(metrics, "shared", 4, clock).request("default") as request:
        request.chunk(Delta(output_tokens=1))
        for second in (1.0, 2.0, 3.5):
            clock.now = 100 + second
            assert total(read(metrics), BUSY) == second


def test_tokens_that_come_late_are_shared_out_over_the_time_they_took() -> None:
    """100 tokens in one piece after 4 s, of which 1 s beside another request."""
    clock, metrics = Clock(), Metrics()
    replica = ReplicaRecorder(metrics, "shared", 4, clock)
    with replica.request("default") as slow:
        slow.chunk(Delta(output_tokens=1))
        clock.pass_(3)
        with replica.request("default") as other:
            other.chunk(Delta(output_tokens=8))
            clock.pass_(1)
            slow.chunk(Delta(output_tokens=99))
    found = read(metrics)
    assert by(found, BUSY, "concurrency") == {"1": 3.0, "2": 1.0}
    assert by(found, TOKENS, "concurrency") == pytest.approx({"1": 75.0, "2": 33.0})


events = st.lists(
    st.tuples(
        st.sampled_from(["enter", "chunk", "chunk", "exit", "read"]),
        st.integers(0, 30),
        st.integers(0, 5),
        st.integers(0, 4000),
    ),
    max_size=150,
)


@dataclass
class Modelled:
    """A request of the model below: when it last had tokens, and tokens not yet booked."""

    since: float | None = None
    pending: int = 0


@settings(max_examples=200, deadline=None)
@given(events)
def test_sums_equal_all_tokens_and_all_busy_time(script: list[tuple[str, int, int, int]]) -> None:
    """Against a model that keeps the whole history of how many were decoding, and integrates it afterwards."""
    clock, metrics = Clock(0.0), Metrics()
    replica = ReplicaRecorder(metrics, "throughput", 64, clock)
    live: list[tuple[RequestMeter, Modelled]] = []
    history: list[tuple[float, int]] = [(0.0, 0)]  # (from, how many decode)
    spans: list[tuple[float, float, int]] = []  # (since, until, tokens)
    tokens = 0

    def count() -> None:
        history.append((clock.now, sum(1 for _, model in live if model.since is not None)))

    def close(model: Modelled, more: int) -> None:
        if more or model.pending:
            assert model.since is not None
            spans.append((model.since, clock.now, more + model.pending))
            model.since, model.pending = clock.now, 0

    for what, which, amount, wait_ms in script:
        if what == "enter":
            live.append((replica.request("flex").__enter__(), Modelled()))
        elif what == "read":
            read(metrics)
        elif live and what == "exit":
            meter, model = live.pop(which % len(live))
            close(model, 0)
            meter.__exit__(None, None, None)
        elif live:
            meter, model = live[which % len(live)]
            meter.chunk(Delta(output_tokens=amount))
            tokens += amount
            if amount and model.since is None:
                model.since, model.pending = clock.now, amount
            elif amount:
                close(model, amount)
        count()
        clock.pass_(wait_ms / 1000)
    for _, model in live:
        close(model, 0)
    while live:
        live.pop()[0].__exit__(None, None, None)

    history.append((clock.now, 0))
    pieces = [(a, b, n) for (a, n), (b, _) in pairwise(history) if n and b > a]
    busy: dict[str, float] = {}
    for a, b, n in pieces:
        bucket = CONCURRENCY[concurrency_index(n)]
        busy[bucket] = busy.get(bucket, 0.0) + b - a
    found = read(metrics)
    assert by(found, BUSY, "concurrency") == pytest.approx(busy, abs=1e-9)
    assert total(found, TOKENS) == pytest.approx(tokens)
    assert total(found, "glm_output_tokens_total") == tokens
    made: dict[str, float] = {}
    instant = 0
    for since, until, n_tokens in spans:
        if until <= since:
            instant += n_tokens  # made in no time: booked under whatever number it was
            continue
        for a, b, n in pieces:
            bucket = CONCURRENCY[concurrency_index(n)]
            overlap = min(b, until) - max(a, since)
            if overlap > 0:
                made[bucket] = made.get(bucket, 0.0) + n_tokens * overlap / (until - since)
    booked = by(found, TOKENS, "concurrency")
    assert sum(booked.values()) - sum(made.values()) == pytest.approx(instant)
    for bucket, amount_made in made.items():
        assert -1e-6 <= booked[bucket] - amount_made <= instant + 1e-6


def test_the_log_of_changes_is_bounded() -> None:
    clock, metrics = Clock(), Metrics()
    replica = ReplicaRecorder(metrics, "shared", 8, clock)
    with replica.request("default") as silent:
        silent.chunk(Delta(output_tokens=1))
        for _ in range(3 * LOG_ENTRIES):
            with replica.request("default") as other:
                other.chunk(Delta(output_tokens=1))
                clock.pass_(0.01)
            clock.pass_(0.01)
        silent.chunk(Delta(output_tokens=99))
    assert len(replica._ledger._log) <= LOG_ENTRIES
    assert by(read(metrics), TOKENS, "concurrency") == pytest.approx({"1": 50, "2": 50 + 3 * LOG_ENTRIES}, rel=0.02)
