"""Start and end the fake server's process; read its truth."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from tests.fake_openai.script import Script

_ROOT = Path(__file__).resolve().parents[2]
_START_DEADLINE_S = 30.0


class FakeServer:
    """The server as a child process on a free loopback port. Use as a context manager; `url` has no path."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.url = ""
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> FakeServer:
        command = [sys.executable, "-m", "tests.fake_openai.server", self.script.to_json()]
        self._process = subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()  # the server prints its port, or dies and closes the pipe
        if not line.strip().isdigit():
            raise RuntimeError(f"fake server did not start: {line!r}")
        self.url = f"http://127.0.0.1:{int(line)}"
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=5)
        if self._process.stdout:
            self._process.stdout.close()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def play(self, script: Script) -> None:
        """Change the script of a running server; forgets log, counters and request numbers."""
        self._call("/fake/script", script.to_json().encode())
        self.script = script

    def log(self) -> list[dict[str, Any]]:
        """One entry a request: `number, arrived, tokens, fault, writes` ([perf_counter, tokens] pairs)."""
        return json.loads(self._call("/fake/log"))

    def counters(self) -> dict[str, float]:
        """`requests, prompt_tokens, output_tokens` as truly produced (not scaled by `counter_scale`)."""
        return json.loads(self._call("/fake/counters"))

    def _call(self, path: str, body: bytes | None = None) -> bytes:
        with urllib.request.urlopen(self.url + path, data=body, timeout=_START_DEADLINE_S) as reply:
            return reply.read()
