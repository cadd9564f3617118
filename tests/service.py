"""A running `glm5 serve` for tests: a real process, ended with everything it started."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

START_S = 150.0
END_S = 40.0
GLM5 = str(Path(sys.executable).with_name("glm5"))


@dataclass(frozen=True)
class Service:
    url: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120.0)

    @property
    def model(self) -> str:
        with self.client as client:
            return str(client.get("/v1/models").json()["data"][0]["id"])

    def processes(self, name: str) -> list[psutil.Process]:
        """Live descendants whose title contains `name` (Ray sets titles such as ray::ServeReplica:glm5:shared)."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if name in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def metric(self, name: str) -> float:
        """Sum of all samples of a metric."""
        with self.client as client:
            lines = client.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)

    def wait_ready(self, within_s: float) -> float:
        """Seconds until /ready said yes."""
        began = time.monotonic()
        with self.client as client:
            while time.monotonic() - began < within_s:
                with contextlib.suppress(httpx.HTTPError):
                    if client.get("/ready", timeout=5.0).status_code == 200:
                        return time.monotonic() - began
                time.sleep(0.2)
        raise AssertionError(f"not ready within {within_s} s:\n{self.log.read_text()[-3000:]}")

    def wait_said(self, words: str, within_s: float) -> None:
        """Until it has printed this. /ready may say yes while the second ingress is still coming up."""
        began = time.monotonic()
        while words not in self.log.read_text(errors="replace"):
            ended = self.process.poll()
            assert ended is None, f"ended with {ended}:\n{self.log.read_text()[-3000:]}"
            assert time.monotonic() - began < within_s, f"never said {words!r}:\n{self.log.read_text()[-3000:]}"
            time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(*arguments: str, sets: Iterable[str] = (), within_s: float = START_S) -> Iterator[Service]:
    """`glm5 serve ARGUMENTS`, with `--set` for each of `sets`, on a free port, ready; at the end Ctrl-C, and no child
    may be left."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "serve.log"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [GLM5, "serve", *arguments, *(f"--set={setting}" for setting in sets), "--port", str(port)],
                stdout=sink,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        service = Service(f"http://127.0.0.1:{port}", process, log)
        children: list[psutil.Process] = []
        try:
            service.wait_said("ready in ", within_s)
            service.wait_ready(within_s)
            yield service
            children = psutil.Process(process.pid).children(recursive=True)
        finally:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            left = [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode is not None, f"glm5 serve did not end within {END_S} s of Ctrl-C"
        assert not left, f"left behind: {left}"
