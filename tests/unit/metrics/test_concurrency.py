"""The core pair: seconds and tokens by concurrency are exact, whatever starts and ends when."""

from __future__ import annotations

import contextlib
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.metrics.declared import Metrics
from service.metrics.labels import CONCURRENCY, concurrency_index
from service.metrics.recorders import ReplicaRecorder
from service.types import Chunk
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
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(replica.request("default"))
        clock.pass_(5)
        first.chunk(Chunk(b"", 1))
        second = replica.request("priority")
        second.__enter__()
        clock.pass_(2)
        second.chunk(Chunk(b"", 2))
        clock.pass_(3)
        first.chunk(Chunk(b"", 10))
    second.chunk(Chunk(b"", 1))
    clock.pass_(1)
    second.__exit__(None, None, None)
    clock.pass_(50)
    found = read(metrics)
    assert by(found, BUSY, "concurrency") == {"1": 3.0, "2": 3.0}
    assert by(found, TOKENS, "concurrency") == {"1": 2.0, "2": 12.0}
    assert by(found, "glm_output_tokens_total", "tier") == {"default": 11.0, "priority": 3.0}


def test_busy_time_is_current_while_nothing_changes() -> None:
    clock, metrics = Clock(), Metrics()
    with ReplicaRecorder(metrics, "shared", 4, clock).request("default") as request:
        request.chunk(Chunk(b"", 1))
        for second in (1.0, 2.0, 3.5):
            clock.now = 100 + second
            assert total(read(metrics), BUSY) == second


def test_a_whole_answer_is_shared_out_over_the_time_it_took() -> None:
    """100 tokens in one chunk at the end of 4 s, of which 1 s beside another request."""
    clock, metrics = Clock(), Metrics()
    replica = ReplicaRecorder(metrics, "shared", 4, clock)
    with replica.request("default", stream=False) as whole:
        clock.pass_(3)
        with replica.request("default") as streamed:
            streamed.chunk(Chunk(b"", 8))
            clock.pass_(1)
            whole.chunk(Chunk(b"", 100))
    found = read(metrics)
    assert by(found, BUSY, "concurrency") == {"1": 3.0, "2": 1.0}
    assert by(found, TOKENS, "concurrency") == pytest.approx({"1": 75.0, "2": 33.0})


events = st.lists(
    st.tuples(
        st.sampled_from(["enter", "enter whole", "chunk", "exit", "read"]),
        st.integers(0, 30),
        st.integers(0, 5),
        st.integers(0, 4000),
    ),
    max_size=150,
)


@settings(max_examples=150, deadline=None)
@given(events)
def test_sums_equal_all_tokens_and_all_busy_time(script: list[tuple[str, int, int, int]]) -> None:
    """Against a model that knows nothing of the ledger: walk the script in time order, integer milliseconds."""
    clock, metrics = Clock(0.0), Metrics()
    replica = ReplicaRecorder(metrics, "throughput", 64, clock)
    live: list[tuple[object, bool]] = []
    decoding: set[int] = set()
    busy: dict[str, float] = {}
    streamed: dict[str, float] = {}
    tokens = 0
    any_whole = False
    for what, which, count, wait_ms in script:
        if what.startswith("enter"):
            meter = replica.request("flex", stream=what == "enter")
            meter.__enter__()
            live.append((meter, what == "enter"))
            if what == "enter whole":
                decoding.add(id(meter))
                any_whole = True
        elif what == "read":
            read(metrics)
        elif live:
            meter, is_stream = live[which % len(live)]
            if what == "exit":
                meter.__exit__(None, None, None)
                live.remove((meter, is_stream))
                decoding.discard(id(meter))
            else:
                if count:
                    decoding.add(id(meter))
                    tokens += count
                meter.chunk(Chunk(b"", count))
                if count and is_stream:
                    bucket = CONCURRENCY[concurrency_index(len(decoding))]
                    streamed[bucket] = streamed.get(bucket, 0) + count
        clock.pass_(wait_ms / 1000)
        if decoding and wait_ms:
            bucket = CONCURRENCY[concurrency_index(len(decoding))]
            busy[bucket] = busy.get(bucket, 0) + wait_ms / 1000
    found = read(metrics)
    assert by(found, BUSY, "concurrency") == pytest.approx(busy, abs=1e-9)
    assert total(found, TOKENS) == pytest.approx(tokens)
    assert total(found, "glm_output_tokens_total") == tokens
    if not any_whole:
        assert by(found, TOKENS, "concurrency") == streamed
