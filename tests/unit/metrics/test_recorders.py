"""What recorders make of a request's life."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import get_args

import pytest

from service.errors import EngineFailed, Overloaded
from service.http.backend import Served
from service.metrics.declared import Metrics
from service.metrics.labels import (
    CONVERSION_REASONS,
    ERROR_CODES,
    LOAD_PHASES,
    OUTCOMES,
    ROUTING_REASONS,
    SCALING_REASONS,
    phase_label,
)
from service.metrics.recorders import ControlRecorder, IngressRecorder, ReplicaRecorder, outcome_of
from service.types import Delta, EngineStats
from tests.unit.metrics.read import Clock, by, read, total, value

CLASS = {"pool": "latency", "tier": "priority"}


def test_a_streamed_request_from_arrival_to_end() -> None:
    clock, metrics = Clock(), Metrics()
    ingress = IngressRecorder(metrics, clock)
    with ingress.request("chat") as request:
        assert value(read(metrics), "glm_requests_in_flight", endpoint="chat") == 1
        clock.pass_(0.3)
        request.served(Served("default", "shared", 0.1))
        request.served(Served("priority", "latency", 0.25))  # a retry moved it: the last one counts
        clock.pass_(0.2)
        request.chunk(Delta(prompt_tokens=12))  # a chunk without tokens is not the first token
        clock.pass_(0.1)
        request.chunk(Delta(output_tokens=2))
        clock.pass_(0.6)
        request.chunk(Delta(output_tokens=3))  # three tokens, 0.2 s each
        clock.pass_(0.3)
    found = read(metrics)
    assert value(found, "glm_ttft_seconds_sum", **CLASS) == pytest.approx(0.6)
    assert value(found, "glm_ttft_seconds_count", **CLASS) == 1
    assert value(found, "glm_itl_seconds_count", **CLASS) == 3
    assert value(found, "glm_itl_seconds_sum", **CLASS) == pytest.approx(0.6)
    assert value(found, "glm_itl_seconds_bucket", **CLASS, le="0.15") == 0
    assert value(found, "glm_itl_seconds_bucket", **CLASS, le="0.3") == 3
    assert value(found, "glm_e2el_seconds_sum", **CLASS) == pytest.approx(1.5)
    assert value(found, "glm_queue_seconds_sum", **CLASS) == pytest.approx(0.25)
    assert value(found, "glm_requests_total", endpoint="chat", outcome="ok", **CLASS) == 1
    assert value(found, "glm_requests_in_flight", endpoint="chat") == 0


def test_a_whole_answer_has_no_first_token_and_no_gaps() -> None:
    metrics = Metrics()
    with IngressRecorder(metrics).request("completions", stream=False) as request:
        request.served(Served("default", "shared", 0.0))
        request.chunk(Delta(output_tokens=40, prompt_tokens=12))
    found = read(metrics)
    assert total(found, "glm_ttft_seconds_count") == total(found, "glm_itl_seconds_count") == 0
    assert total(found, "glm_e2el_seconds_count") == 1


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "ok"),
        (asyncio.CancelledError(), "client_gone"),
        (GeneratorExit(), "client_gone"),
        (Overloaded("full", retry_after_s=1), "overloaded"),
        (EngineFailed("died"), "engine_failed"),
        (KeyError("a bug"), "error"),
    ],
)
def test_outcomes(error: BaseException | None, outcome: str) -> None:
    metrics = Metrics()
    assert outcome_of(error) == outcome
    try:
        with IngressRecorder(metrics).request("chat"):
            if error is not None:
                raise error
    except (Exception, asyncio.CancelledError, GeneratorExit) as raised:  # noqa: BLE001
        assert raised is error  # nothing is swallowed
    found = read(metrics)
    assert by(found, "glm_requests_total", "outcome") == {outcome: 1}
    assert total(found, "glm_e2el_seconds_count") == (1 if outcome == "ok" else 0)
    assert by(found, "glm_requests_total", "pool") == {"none": 1}


def test_a_refusal_before_a_place_was_had_is_a_rejection() -> None:
    metrics = Metrics()
    ingress = IngressRecorder(metrics)
    assert value(read(metrics), "glm_rejections_total", reason="overloaded") == 0
    with contextlib.suppress(Overloaded), ingress.request("chat"):
        raise Overloaded("full")
    with contextlib.suppress(EngineFailed), ingress.request("chat") as request:
        request.served(Served("default", "shared", 0.0))
        raise EngineFailed("died at work: no rejection")
    assert by(read(metrics), "glm_rejections_total", "reason") == {"overloaded": 1}


def test_a_cancel_by_our_deadline_is_not_a_client_that_left() -> None:
    clock, metrics = Clock(), Metrics()
    for seconds in (4.0, 5.0):
        with (
            contextlib.suppress(asyncio.CancelledError),
            IngressRecorder(metrics, clock).request("chat", timeout_s=5.0),
        ):
            clock.pass_(seconds)
            raise asyncio.CancelledError
    assert by(read(metrics), "glm_requests_total", "outcome") == {"client_gone": 1, "deadline_exceeded": 1}


def test_reasons_of_routing_and_scaling_are_in_the_closed_sets() -> None:
    from service.routing import pick
    from service.scaling import conversion, policy

    assert set(pick.REASONS) < set(ROUTING_REASONS)
    assert set(get_args(policy.Reason)) < set(SCALING_REASONS)
    assert set(get_args(conversion.Why)) < set(CONVERSION_REASONS)


async def test_a_client_that_leaves_a_generator() -> None:
    metrics = Metrics()
    ingress = IngressRecorder(metrics)

    async def answer() -> AsyncGenerator[int, None]:
        with ingress.request("chat"):
            yield 1
            await asyncio.sleep(60)

    stream = answer()
    await anext(stream)
    await stream.aclose()
    assert by(read(metrics), "glm_requests_total", "outcome") == {"client_gone": 1}


def test_every_error_of_the_family_is_an_outcome() -> None:
    assert set(ERROR_CODES) < set(OUTCOMES)
    assert {"overloaded", "deadline_exceeded", "not_ready", "internal_error"} <= set(OUTCOMES)


def test_words_outside_the_closed_sets_are_counted_as_other() -> None:
    metrics = Metrics()
    ingress, control = IngressRecorder(metrics), ControlRecorder(metrics)
    for word in ("overloaded", "the user's own words", '"} 1\nevil 2'):
        ingress.rejected(word)
        ingress.routed("shared", word)
        control.scaling("shared", "up", word)
        control.conversion("latency", False, word)
    found = read(metrics)
    assert by(found, "glm_rejections_total", "reason") == {"overloaded": 1, "other": 2}
    for name in ("glm_routing_decisions_total", "glm_scaling_decisions_total", "glm_conversion_decisions_total"):
        assert by(found, name, "reason") == {"other": 3}


def test_engine_books_with_counted_steps() -> None:
    metrics = Metrics()
    replica = ReplicaRecorder(metrics, "shared", 8)
    replica.engine(EngineStats(8, running=3, waiting=1, steps=10, busy_s=0.5, kv_used=0.25, drafted=30, accepted=20))
    replica.engine(EngineStats(8, running=2, steps=30, busy_s=0.9, kv_used=0.5, drafted=60, accepted=50))
    found = read(metrics)
    assert value(found, "glm_decode_step_seconds_count", pool="shared") == 30
    assert value(found, "glm_decode_step_seconds_sum", pool="shared") == pytest.approx(0.9)
    assert value(found, "glm_decode_step_seconds_bucket", pool="shared", le="0.02") == 20
    assert value(found, "glm_speculative_drafted_tokens_total", pool="shared") == 60
    assert value(found, "glm_speculative_accepted_tokens_total", pool="shared") == 50
    assert value(found, "glm_slots", pool="shared") == 8
    assert value(found, "glm_requests_running", pool="shared") == 2
    assert value(found, "glm_kv_used_ratio", pool="shared") == 0.5
    assert value(found, "glm_replicas_ready", pool="shared") == 1
    # A fresh load starts its counters again; the service's totals go on.
    replica.engine(EngineStats(8, steps=5, busy_s=0.1, drafted=6, accepted=5))
    replica.engine(EngineStats(8, alive=False, extra={"kernel_fallback": 1.0}))
    found = read(metrics)
    assert value(found, "glm_speculative_drafted_tokens_total", pool="shared") == 66
    assert value(found, "glm_slots", pool="shared") == value(found, "glm_replicas_ready", pool="shared") == 0
    assert value(found, "glm_kernel_fallback", pool="shared") == 1


def test_step_time_of_an_engine_that_counts_no_steps() -> None:
    """Two requests for 2 s at one token each per 20 ms: 100 steps, 200 tokens."""
    clock, metrics = Clock(), Metrics()
    replica = ReplicaRecorder(metrics, "shared", 8, clock)
    with replica.request("default") as a, replica.request("default") as b:
        a.chunk(Delta(output_tokens=1))
        b.chunk(Delta(output_tokens=1))
        replica.engine(EngineStats(8, running=2))
        for _ in range(100):
            clock.pass_(0.02)
            a.chunk(Delta(output_tokens=1))
            b.chunk(Delta(output_tokens=1))
        replica.engine(EngineStats(8, running=2))
        found = read(metrics)
        assert value(found, "glm_decode_step_seconds_count", pool="shared") == 100
        assert value(found, "glm_decode_step_seconds_sum", pool="shared") == pytest.approx(2.0)
        clock.pass_(1)
        a.chunk(Delta(output_tokens=10))
        replica.engine(EngineStats(8, running=2, drafted=10))  # with drafts a token is no step: say nothing
        assert value(read(metrics), "glm_decode_step_seconds_count", pool="shared") == 100


def test_prompt_tokens_and_load_phases() -> None:
    metrics = Metrics()
    replica = ReplicaRecorder(metrics, "latency", 2)
    with replica.request("priority") as request:
        request.chunk(Delta(output_tokens=1, prompt_tokens=30, cached_tokens=10))
    replica.load_phase("reading weights", 12.5)
    replica.load_phase("something new", 1.0)
    replica.predicted_step(0.023)
    found = read(metrics)
    assert value(found, "glm_prompt_tokens_total", **CLASS) == 30
    assert value(found, "glm_prompt_cached_tokens_total", **CLASS) == 10
    assert by(found, "glm_load_phase_seconds_count", "phase") == {"weights": 1, "other": 1}
    assert value(found, "glm_decode_step_predicted_seconds", pool="latency") == 0.023


@pytest.mark.parametrize(
    ("words", "label"),
    [
        ("reading weights", "weights"),
        ("simulated load", "weights"),
        ("capturing CUDA graphs", "compile"),
        ("warming up", "warm"),
        ("checking", "header"),
        ("starting workers", "start"),
        ("allocating KV", "kv"),
        ("judging", "canary"),
        ("canary", "canary"),
        ("/home/alice/secret.gguf", "other"),
    ],
)
def test_phase_labels(words: str, label: str) -> None:
    assert phase_label(words) == label
    assert label in LOAD_PHASES
