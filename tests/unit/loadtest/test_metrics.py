"""Definitions on records made by hand, where every number can be done in the head."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from loadtest import verdict
from loadtest.counters import CrossCheck
from loadtest.metrics import Measured, Window, measure, window_of
from loadtest.records import CANCELLED, Record
from loadtest.shard import Pulse


def request(
    sent: float, times: Sequence[float], *, lane: int = 0, tokens: Sequence[float] = (), warmup: bool = False,
    error: str = "", scheduled: float | None = None, end: float | None = None,
) -> Record:  # fmt: skip
    record = Record(0, lane, warmup, sent if scheduled is None else scheduled, sent, error=error, prompt_tokens=10)
    record.times = array("d", times)
    record.tokens = array("d", tokens or [1.0] * len(times))
    record.output_tokens = record.asked_tokens = round(sum(record.tokens))
    record.first_answer = times[0] if times else 0.0
    record.end = end if end is not None else (times[-1] if times else sent)
    return record


def test_latencies_of_one_request() -> None:
    m = measure([request(10.0, [10.5, 10.6, 10.8])], Window(10.0, 11.0))
    assert m.ttft and m.e2el and m.tpot and m.icl and m.per_user_tok_s
    assert m.ttft.mean == pytest.approx(0.5)
    assert m.e2el.mean == pytest.approx(0.8)
    assert m.tpot.mean == pytest.approx(0.15)  # two gaps, not three tokens
    assert (m.icl.n, m.icl.min, m.icl.max) == (2, pytest.approx(0.1), pytest.approx(0.2))
    assert m.per_user_tok_s.p50 == pytest.approx(1 / 0.15)
    assert m.output_tok_s == pytest.approx(3.0)


def test_gap_before_a_chunk_of_several_tokens_counts_for_each() -> None:
    m = measure([request(0.0, [1.0, 1.4, 1.5], tokens=[1, 4, 1])], Window(0.0, 2.0))
    assert m.icl and m.itl
    assert (m.icl.n, m.icl.mean) == (2, pytest.approx(0.25))
    assert (m.itl.n, m.itl.mean, m.itl.p50) == (5, pytest.approx(0.1), pytest.approx(0.1))


def test_answer_of_one_token_has_no_tpot() -> None:
    m = measure([request(0.0, [1.0])], Window(0.0, 1.0))
    assert m.tpot is None
    assert m.ttft is not None


def test_open_loop_waiting_counts() -> None:
    m = measure([request(5.0, [5.1], scheduled=2.0)], Window(2.0, 6.0))
    assert m.ttft is not None
    assert m.ttft.mean == pytest.approx(3.1)


def test_window_is_from_all_active_to_the_first_dry() -> None:
    records = [
        request(0.0, [1.0], lane=0, warmup=True),
        request(1.0, [2.0], lane=0),
        request(2.0, [6.0], lane=0),
        request(0.0, [3.0], lane=1, warmup=True),
        request(3.0, [5.0], lane=1),
    ]
    assert window_of(records, 2, open_loop=False) == Window(3.0, 5.0)
    assert window_of(records, 3, open_loop=False) is None  # a third stream never ran
    assert window_of(records[:1], 1, open_loop=False) is None  # warm-up alone is nothing


def test_tokens_and_requests_at_the_edges() -> None:
    records = [
        request(0.0, [1.0, 2.0, 3.0, 4.0]),  # half of its life and three tokens (2, 3 and 4) inside
        request(2.0, [3.5, 7.0], end=7.0),  # 2 of 5 s inside, one token
        request(4.0, [5.0], warmup=True),
        request(2.5, [3.0], error="missing_done"),
    ]
    m = measure(records, Window(2.0, 4.0))
    assert m.output_tok_s == pytest.approx(4 / 2)
    assert m.request_s == pytest.approx((0.5 + 0.4) / 2)


def test_peak_is_the_best_second_and_never_below_the_mean() -> None:
    burst = request(0.0, [2.1, 2.2, 2.3, 2.4])
    m = measure([burst], Window(0.0, 4.0))
    assert (m.output_tok_s, m.peak_tok_s) == (pytest.approx(1.0), pytest.approx(4.0))
    short = measure([burst], Window(2.0, 2.5))
    assert short.peak_tok_s == short.output_tok_s


def test_failures_are_counted_apart_and_enter_nothing_else() -> None:
    http = request(0.0, [], error="http")
    http.status = 503
    records = [
        request(0.0, [1.0, 2.0]),
        http,
        request(0.0, [0.01], error="error_event"),
        request(0.0, [], error=CANCELLED),
    ]
    m = measure(records, Window(0.0, 2.0), {"ttft": 1.5})
    assert m.errors == {"error_event": 1, "http_503": 1}
    assert (m.sent, m.ok, m.failed, m.cancelled) == (4, 1, 2, 1)
    assert m.ttft is not None
    assert m.ttft.n == 1
    assert m.goodput is not None
    assert m.goodput.share == pytest.approx(1 / 3)


def test_goodput_needs_every_limit() -> None:
    records = [request(0.0, [1.0, 1.1]), request(0.0, [1.0, 3.0]), request(0.0, [5.0, 5.1])]
    m = measure(records, Window(0.0, 10.0), {"ttft": 2.0, "tpot": 0.5})
    assert m.goodput is not None
    assert m.goodput.share == pytest.approx(1 / 3)
    assert m.goodput.request_s == pytest.approx(0.1)


def pulse(busy: float, lag: float) -> Pulse:
    times = [i * 0.1 for i in range(50)]
    return Pulse(array("d", times), array("d", [t * busy for t in times]), array("d", [lag] * 50))


def test_client_load_is_the_worst_shard_inside_the_window() -> None:
    load = verdict.client_load([pulse(0.2, 0.001), pulse(0.95, 0.002)], Window(1.0, 4.0))
    assert load is not None
    assert (load.shards, load.busy, load.lag_p95_s) == (2, pytest.approx(0.95), pytest.approx(0.002))
    starved = Pulse(array("d", [0.1, 5.0]), array("d", [0.0, 4.0]), array("d", [0.0, 4.8]))
    load = verdict.client_load([starved], Window(0.2, 4.9))
    assert load is not None
    assert load.busy == 1.0


def good(**changes: object) -> Measured:
    return Measured(**{"sent": 4, "ok": 4, "failed": 0, "cancelled": 0, "window_s": 5.0} | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("measured", "load", "check", "begin"),
    [
        (good(), verdict.ClientLoad(1, 0.95, 0.0, 0.0), None, "client saturated"),
        (good(), verdict.ClientLoad(1, 0.1, 0.2, 0.2), None, "client late"),
        (good(), None, CrossCheck("disagree", "vllm", 90, 100, "why"), "token counts disagree: client 90, server 100"),
        (good(window_s=None), None, None, "no steady window"),
        (good(ok=0, failed=4), None, None, "no request succeeded"),
        (good(cancelled=2), None, None, "interrupted"),
    ],
)
def test_reasons_against_a_level(
    measured: Measured, load: verdict.ClientLoad | None, check: CrossCheck | None, begin: str
) -> None:
    reasons, _ = verdict.judge(measured, load, check)
    assert len(reasons) == 1
    assert reasons[0].startswith(begin)
    assert verdict.judge(good(), verdict.ClientLoad(1, 0.5, 0.001, 0.1), CrossCheck("agree"))[0] == ()
