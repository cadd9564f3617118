"""The fake server's process: `python -m tests.fake_openai.server SCRIPT [PORT]`; prints its port, serves till SIGTERM.

SCRIPT is a Script as JSON, or the name of a file that holds one. Without PORT a free one is taken.

Written on bare sockets (httptools for parsing requests) because it must outrun the client that it measures.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import sys
from collections import deque
from pathlib import Path
from time import perf_counter
from typing import Any

import httptools

from tests.fake_openai.script import Script
from tests.fake_openai.stream import Stream, envelope

_NAMES = {
    "glm": ("glm_output_tokens_total", "glm_prompt_tokens_total"),
    "vllm": ("vllm:generation_tokens_total", "vllm:prompt_tokens_total"),
    "llamacpp": ("llamacpp:tokens_predicted_total", "llamacpp:prompt_tokens_total"),
}


class Truth:
    """What the server did under the present script."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.log: list[dict[str, Any]] = []
        self.history: list[tuple[float, int, int]] = []  # (clock, prompt tokens, output tokens) at each answer's end
        self.running = 0
        self.queue: deque[Stream] = deque()

    def start_or_queue(self, stream: Stream) -> None:
        if self.script.slots and self.running >= self.script.slots:
            self.queue.append(stream)
        else:
            self.running += 1
            stream.start()

    def ended(self) -> None:
        self.history.append((perf_counter(), self.prompt_tokens, self.output_tokens))
        self.running -= 1
        while self.queue and self.running < self.script.slots:
            stream = self.queue.popleft()
            if not stream.cancelled:
                self.running += 1
                stream.start()

    def metrics(self) -> bytes:
        output, prompt = _NAMES[self.script.dialect]
        prompt_tokens, output_tokens = self.prompt_tokens, self.output_tokens
        if self.script.counter_delay_s:
            shown = [row for row in self.history if row[0] <= perf_counter() - self.script.counter_delay_s]
            prompt_tokens, output_tokens = shown[-1][1:] if shown else (0, 0)
        scale, half = self.script.counter_scale, output_tokens // 2
        return (
            f"# HELP {output} Tokens made.\n# TYPE {output} counter\n"
            f'{output}{{model="{self.script.model}",half="a"}} {half * scale}\n'
            f'{output}{{model="{self.script.model}",half="b"}} {(output_tokens - half) * scale}\n'
            f"# TYPE {prompt} counter\n{prompt} {prompt_tokens * scale}\n"
        ).encode()


class Connection(asyncio.Protocol):
    """One client socket; requests on it are answered one after another (no pipelining)."""

    def __init__(self, holder: list[Truth]) -> None:
        self.holder = holder
        self.stream: Stream | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self._reset()

    def _reset(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.path = ""
        self.body = b""

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.close()

    def connection_lost(self, _: Exception | None) -> None:
        if self.stream is not None:
            self.stream.cancel()

    def on_url(self, url: bytes) -> None:
        self.path += url.decode()

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        arrived = perf_counter()
        path, body = self.path.split("?")[0], self.body
        asyncio.get_running_loop().call_soon(self._reset)
        truth = self.holder[0]
        if path in ("/v1/chat/completions", "/v1/completions"):
            self._generate(truth, path, body, arrived)
        elif path == "/metrics":
            self._reply(200, truth.metrics(), "text/plain; version=0.0.4")
        elif path == "/v1/models":
            self._reply_json(200, {"object": "list", "data": [{"id": truth.script.model, "object": "model"}]})
        elif path == "/fake/log":
            self._reply_json(200, truth.log)
        elif path == "/fake/counters":
            kept = ("requests", "prompt_tokens", "output_tokens")
            self._reply_json(200, {name: getattr(truth, name) for name in kept})
        elif path == "/fake/script":
            self.holder[0] = Truth(Script.from_json(body))
            self._reply_json(200, {})
        elif path in ("/health", "/ready"):
            self._reply_json(200, {"status": "ok"})
        else:
            self._reply_json(404, envelope(f"no route {path}", "not_found"))

    def _generate(self, truth: Truth, path: str, body: bytes, arrived: float) -> None:
        script = truth.script
        try:
            request = json.loads(body)
        except json.JSONDecodeError:
            return self._reply_json(400, envelope("body is not JSON", "invalid_request"))
        for field in script.refuse_fields:
            if field in request:
                return self._reply_json(400, envelope(f"unsupported field {field}", "unsupported_field", param=field))
        number, truth.requests = truth.requests, truth.requests + 1
        fault = next((fault.kind for fault in script.faults if fault.hits(number)), None)
        text = request.get("prompt") or " ".join(str(m["content"]) for m in request.get("messages", ()))
        prompt_tokens = 7 + (4 * len(text.split()) + 2) // 3  # a chat template of 7, and 4/3 tokens a word
        tokens = request.get("max_tokens") or request.get("max_completion_tokens") or script.output_tokens
        entry = {"number": number, "arrived": arrived, "tokens": 0, "fault": fault, "writes": []}
        truth.log.append(entry)
        if fault in ("http_500", "http_429"):
            extra = "Retry-After: 1\r\n" if fault == "http_429" else ""
            return self._reply_json(int(fault[-3:]), envelope("injected", fault), extra)
        truth.prompt_tokens += prompt_tokens
        self.stream = Stream(
            transport=self.transport,
            truth=truth,
            entry=entry,
            chat=path.endswith("chat/completions"),
            streamed=bool(request.get("stream")),
            tokens=0 if fault == "empty" else int(tokens),
            prompt_tokens=prompt_tokens,
            fault=fault,
        )
        truth.start_or_queue(self.stream)
        return None

    def _reply_json(self, status: int, body: Any, extra: str = "") -> None:
        self._reply(status, json.dumps(body).encode(), "application/json", extra)

    def _reply(self, status: int, body: bytes, content_type: str, extra: str = "") -> None:
        head = f"HTTP/1.1 {status} X\r\nContent-Type: {content_type}\r\n{extra}Content-Length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + body)


async def _serve(script: Script, port: int) -> None:
    loop = asyncio.get_running_loop()
    holder = [Truth(script)]
    server = await loop.create_server(lambda: Connection(holder), "127.0.0.1", port, backlog=4096)
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection of the log would be a pause in every stream
    print(server.sockets[0].getsockname()[1], flush=True)
    parent = os.getppid()
    while not stop.is_set() and os.getppid() == parent:  # a killed test run must not leave its server behind
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 1.0)
    server.close()


if __name__ == "__main__":
    import uvloop

    given = sys.argv[1] if sys.argv[1].startswith("{") else Path(sys.argv[1]).read_text()
    uvloop.run(_serve(Script.from_json(given), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
