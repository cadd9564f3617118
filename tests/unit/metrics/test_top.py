"""`glm5 top`: figures from two scrapes, and the command against a small HTTP server."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from rich.console import Console
from typer.testing import CliRunner

from service.errors import UserError
from service.http.backend import Served
from service.metrics.cli import app, render
from service.metrics.declared import Metrics
from service.metrics.exchange import merge, snapshot
from service.metrics.recorders import IngressRecorder, ReplicaRecorder
from service.metrics.top import Scrape, figures, quantile
from service.types import Delta, EngineStats
from tests.unit.metrics.read import Clock


class Busy:
    """A replica and an ingress on a clock that the test moves."""

    def __init__(self) -> None:
        self.clock, self.metrics = Clock(), Metrics()
        self.replica = ReplicaRecorder(self.metrics, "shared", 4, self.clock)
        self.ingress = IngressRecorder(self.metrics, self.clock)

    def serve(self, at_once: int, tokens: int, gap_s: float) -> None:
        """`at_once` equal requests of `tokens` tokens, one token each per `gap_s`."""
        outer = [self.ingress.request("chat").__enter__() for _ in range(at_once)]
        inner = [self.replica.request("default").__enter__() for _ in range(at_once)]
        self.clock.pass_(0.3)
        for token in range(tokens):
            for ingress, replica in zip(outer, inner, strict=True):
                ingress.served(Served("default", "shared", 0.02))
                replica.chunk(Delta(output_tokens=1))
                ingress.chunk(Delta(output_tokens=1))
            if token < tokens - 1:
                self.clock.pass_(gap_s)
        for meter in (*outer, *inner):
            meter.__exit__(None, None, None)
        self.replica.engine(EngineStats(4, running=0, waiting=0, kv_used=0.5))

    def text(self) -> str:
        return merge([snapshot(self.metrics)]).decode()

    def scrape(self) -> Scrape:
        return Scrape.parse(self.text(), self.clock())


def test_figures_between_two_scrapes() -> None:
    busy = Busy()
    busy.serve(1, 101, 0.01)  # recorded: 101 tokens in 1 s
    before = busy.scrape()
    busy.serve(1, 51, 0.02)  # now: 51 tokens in 1 s
    busy.serve(3, 11, 0.05)  # 33 tokens in 0.5 s
    busy.clock.pass_(0.4)
    found = figures(before, busy.scrape())
    (pool,) = found.pools
    seconds = 0.3 + 1.0 + 0.3 + 0.5 + 0.4
    assert pool.tokens_per_s == pytest.approx(84 / seconds)
    points = {point.concurrency: point for point in pool.curve}
    assert points["1"].recorded == pytest.approx(152 / 2)
    assert points["1"].now == pytest.approx(51)
    assert points["3-4"].now == pytest.approx(66)
    assert pool.current is points["1"]
    assert points["1"].share == pytest.approx(2 / 3)
    assert found.requests_per_s == pytest.approx(4 / seconds)
    assert found.failed_per_s == found.refused_per_s == 0
    assert (pool.ready, pool.slots, pool.kv_used) == (1, 4, 0.5)
    assert pool.ttft_p95_s == pytest.approx(0.295, abs=0.006)  # all in the bucket 0.2 to 0.3
    assert pool.queue_p95_s is not None and 0.01 < pool.queue_p95_s <= 0.025


def test_an_idle_service_has_a_curve_and_nothing_now() -> None:
    busy = Busy()
    busy.serve(2, 11, 0.1)
    before = busy.scrape()
    busy.clock.pass_(5)
    (pool,) = figures(before, busy.scrape()).pools
    assert pool.tokens_per_s == 0
    assert pool.current is None
    assert pool.ttft_p95_s is None
    assert [(point.concurrency, point.now) for point in pool.curve] == [("2", None)]


def test_a_service_that_has_just_started() -> None:
    found = figures(Busy().scrape(), Busy().scrape())
    assert found.pools[0].curve == ()
    Console(file=open("/dev/null", "w")).print(render(found))  # noqa: SIM115, PTH123


@pytest.mark.parametrize(
    ("buckets", "q", "wanted"),
    [
        ({}, 0.5, None),
        ({1.0: 0, math.inf: 0}, 0.5, None),
        ({1.0: 10, math.inf: 10}, 0.5, 0.5),
        ({1.0: 5, 2.0: 10, math.inf: 10}, 0.75, 1.5),
        ({1.0: 5, math.inf: 10}, 0.95, 1.0),
    ],
)
def test_quantile(buckets: dict[float, float], q: float, wanted: float | None) -> None:
    assert quantile(q, buckets) == wanted


@contextmanager
def serving(busy: Busy, status: int = 200, text: str | None = None) -> Iterator[str]:
    """Serves the metrics of `busy`, which works a little before each reading."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            busy.serve(2, 11, 0.1)
            data = (busy.text() if text is None else text).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def run(url: str, *more: str) -> str:
    result = CliRunner().invoke(app, ["--url", url, "--once", "--interval", "0.1", *more])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_the_command_for_people_and_for_machines() -> None:
    with serving(Busy()) as url:
        screen = run(url)
        assert "shared" in screen
        assert "22.0" in screen  # 22 tokens in 1 s at two at once
        tree = json.loads(run(url, "--json"))
        assert tree["pools"]["shared"]["curve"][0] == pytest.approx(
            {"concurrency": "2", "recorded": 22.0, "now": 22.0, "share": 1.0}
        )


@pytest.mark.parametrize(
    ("status", "text", "says"),
    [(503, "", "answered 503"), (200, "<html>", "not Prometheus text"), (200, "up 1\n", "no metrics of this service")],
)
def test_another_server_is_one_sentence(status: int, text: str, says: str) -> None:
    with serving(Busy(), status, text) as url, pytest.raises(UserError, match=says):
        run(url)


def test_no_server_is_one_sentence() -> None:
    with pytest.raises(UserError, match="cannot be read"):
        run("http://127.0.0.1:9")
