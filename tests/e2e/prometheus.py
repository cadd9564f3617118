"""A real Prometheus for tests, with the project's relabelling and alert rules, and small exporters for it to scrape."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.service import free_port

ROOT = Path(__file__).resolve().parents[2]
DASHBOARDS = ROOT / "dashboards"
START_S = 20.0


@dataclass(frozen=True)
class Prometheus:
    url: str

    def query(self, expression: str, at: float | None = None) -> list[dict[str, Any]]:
        """Instant query: [{"metric": {...}, "value": [time, "number"]}]. Raises with Prometheus' words on a bad one."""
        parameters = {"query": expression} | ({} if at is None else {"time": f"{at:.3f}"})
        answer = httpx.get(f"{self.url}/api/v1/query", params=parameters, timeout=20.0).json()
        assert answer["status"] == "success", f"{expression}: {answer}"
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def value(self, expression: str, at: float | None = None) -> float:
        """Of an expression with exactly one series."""
        (one,) = self.query(expression, at)
        return float(one["value"][1])

    def rules(self) -> list[dict[str, Any]]:
        groups = httpx.get(f"{self.url}/api/v1/rules", timeout=20.0).json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def targets(self) -> dict[str, str]:
        """Job -> health, and why where it is not up."""
        active = httpx.get(f"{self.url}/api/v1/targets", timeout=20.0).json()["data"]["activeTargets"]
        return {target["labels"]["job"]: target["health"] + target["lastError"] for target in active}

    def wait(self, expression: str, holds: Callable[[list[dict[str, Any]]], bool], within_s: float) -> None:
        """Until the expression's answer is as wanted."""
        end = time.monotonic() + within_s
        while not holds(found := self.query(expression)):
            assert time.monotonic() < end, f"{expression} is {found} after {within_s} s; targets {self.targets()}"
            time.sleep(0.25)


@contextlib.contextmanager
def prometheus(folder: Path, targets: Mapping[str, str], history: str = "") -> Iterator[Prometheus]:
    """Scrapes `targets` (job -> URL of its metrics) every second. `history`: OpenMetrics text with old samples."""
    data = folder / "data"
    data.mkdir()
    if history:
        source = folder / "history.om"
        source.write_text(history)
        command = ["promtool", "tsdb", "create-blocks-from", "openmetrics", str(source), str(data)]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    relabel = yaml.safe_load((DASHBOARDS / "relabel.yml").read_text())
    jobs = []
    for job, url in targets.items():
        parsed = httpx.URL(url)
        jobs.append(
            {
                "job_name": job,
                "metrics_path": parsed.path,
                "static_configs": [{"targets": [f"{parsed.host}:{parsed.port}"]}],
                "metric_relabel_configs": relabel,
            }
        )
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(DASHBOARDS / "alerts.yml")],
        "scrape_configs": jobs,
    }
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    port = free_port()
    log = folder / "prometheus.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={path}",
                f"--storage.tsdb.path={data}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=sink,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
    try:
        there = Prometheus(f"http://127.0.0.1:{port}")
        end = time.monotonic() + START_S
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{there.url}/-/ready", timeout=2.0).status_code == 200:
                    break
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-2000:]
            time.sleep(0.1)
        yield there
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(15)


@contextlib.contextmanager
def exporter(text: Callable[[], str]) -> Iterator[str]:
    """Serves what `text()` says as Prometheus text; yields the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = text().encode()
            self.send_response(200)
            self.send_header("content-type", "text/plain; version=0.0.4")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            with contextlib.suppress(BrokenPipeError):  # a scrape that was given up
                self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
