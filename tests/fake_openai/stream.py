"""One answer of the fake server: what is written when."""

from __future__ import annotations

import asyncio
import json
from time import perf_counter
from typing import Any

_HEAD = "HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n{close}Transfer-Encoding: chunked\r\n\r\n"
_WORD = " word"


def envelope(message: str, code: str, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": "fake_error", "code": code, "param": param}}


def _framed(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


class Stream:
    """Writes one answer on the script's schedule and notes the clock at every write. `cancel` when the client left."""

    def __init__(
        self,
        *,
        transport: asyncio.BaseTransport,
        truth: Any,
        entry: dict[str, Any],
        chat: bool,
        streamed: bool,
        tokens: int,
        prompt_tokens: int,
        fault: str | None,
    ) -> None:
        self.transport, self.truth, self.script, self.entry = transport, truth, truth.script, entry
        self.chat, self.streamed, self.fault = chat, streamed, fault
        self.tokens, self.prompt_tokens = tokens, prompt_tokens
        self.stop_at = tokens // 2 if fault in ("error_event", "hang", "truncated_json", "disconnect") else tokens
        self.made = 0
        self.writes = 0
        self.made_events: dict[tuple[str, int], bytes] = {}
        self.cancelled = self.finished = self.started = False
        self.timer: asyncio.TimerHandle | None = None
        self.loop = asyncio.get_running_loop()
        kind = "chat.completion.chunk" if chat else "text_completion"
        base = {"id": f"fake-{entry['number']}", "object": kind, "created": 1, "model": self.script.model}
        self.prefix = json.dumps(base)[:-1]

    def start(self) -> None:
        self.started = True
        close = "Connection: close\r\n" if self.script.close else ""
        if not self.streamed:
            self.timer = self.loop.call_later(
                self.script.ttft_s + self.script.itl_s * max(self.tokens - 1, 0), self._whole
            )
            return
        head = _HEAD.format(kind="text/event-stream", close=close).encode()
        if self.script.role_chunk and self.chat:
            head += _framed(self._event(self._choice({"role": "assistant", "content": ""})))
        self.transport.write(head)
        self.begin = perf_counter() + self.script.ttft_s + self.entry["number"] % 10 * self.script.ttft_step_s
        self._plan()

    def cancel(self) -> None:
        self.cancelled = True
        if self.timer is not None:
            self.timer.cancel()
        self._end()

    def _plan(self) -> None:
        """Set the timer for the next write: at the moment its last token is due."""
        step = min(self.script.tokens_per_chunk * self.script.events_per_write, self.stop_at - self.made)
        if step <= 0:
            return self._finish()
        last = self.made + step - 1 if self.made else step - 1
        due = self.begin + last * self.script.itl_s
        self.timer = self.loop.call_later(max(due - perf_counter(), 0), self._write, step)
        return None

    def _write(self, step: int) -> None:
        events = []
        left = step
        while left > 0:
            count = min(self.script.tokens_per_chunk, left)
            # A chunk holds either reasoning or answer, never both.
            if self.made < self.script.reasoning_tokens:
                count = min(count, self.script.reasoning_tokens - self.made)
                events.append(self._content("reasoning_content", count))
            else:
                events.append(self._content("content", count))
            self.made += count
            left -= count
        self.truth.output_tokens += step
        if self.script.log_writes:  # the clock before the write: no client can have these bytes earlier
            self.entry["writes"].append((perf_counter(), step))
        self._send(b"".join(events))
        if self.made >= self.stop_at:
            self._finish()
        else:
            self._plan()

    def _finish(self) -> None:
        self.entry["tokens"] = self.made
        if self.fault == "hang":
            return None
        if self.fault == "disconnect":
            self.transport.write(b"ff\r\ndata: {")
            self.transport.close()
            return self._end()
        tail = b""
        if self.fault == "error_event":
            tail = self._event(json.dumps(envelope("engine died", "engine_failed")))
        elif self.fault == "truncated_json":
            tail = ("data: " + self._choice({"content": "cut"}))[:-20].encode()
        else:
            tail = self._event(self._choice({}, "length"))
            if self.fault != "no_usage":
                usage = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.made}
                usage["total_tokens"] = self.prompt_tokens + self.made
                tail += self._event(f'{self.prefix}, "choices": [], "usage": {json.dumps(usage)}}}')
            if self.fault != "missing_done":
                tail += self._event("[DONE]")
        self._send(tail, last=True)
        if self.script.close:
            self.transport.close()
        return self._end()

    def _whole(self) -> None:
        text = _WORD * self.tokens
        message = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        usage = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.tokens}
        choice = json.dumps({"index": 0, "finish_reason": "length", **message})
        body = f'{self.prefix}, "choices": [{choice}], "usage": {json.dumps(usage)}}}'.encode()
        self.truth.output_tokens += self.tokens
        self.entry["tokens"] = self.tokens
        self.entry["writes"].append((perf_counter(), self.tokens))
        self.transport.write(_HEAD.format(kind="application/json", close="").encode() + _framed(body) + b"0\r\n\r\n")
        self._end()

    def _end(self) -> None:
        if not self.finished:
            self.finished = True
            if self.started:
                self.truth.ended()

    def _choice(self, delta: dict[str, Any], finish: str | None = None) -> str:
        reason = "null" if finish is None else f'"{finish}"'
        if self.chat:
            inner = f'"delta": {json.dumps(delta)}'
        else:
            inner = f'"text": {json.dumps(delta.get("content", ""))}'
        return f'{self.prefix}, "choices": [{{"index": 0, {inner}, "logprobs": null, "finish_reason": {reason}}}]}}'

    def _content(self, field: str, tokens: int) -> bytes:
        """An event of so many tokens; made once, since all are alike: the server must outrun its clients."""
        made = self.made_events.get((field, tokens))
        if made is None:
            made = self.made_events[field, tokens] = self._event(self._choice({field: _WORD * tokens}))
        return made

    def _event(self, data: str) -> bytes:
        newline = self.script.newline
        comment = f": ping{newline}{newline}" if self.script.comments else ""
        return f"{comment}data: {data}{newline}{newline}".encode()

    def _send(self, payload: bytes, last: bool = False) -> None:
        """One HTTP chunk; under `split` two, cut at a place that moves with every write."""
        self.writes += 1
        if self.script.split:
            cut = (self.writes * 7) % len(payload)
            if cut:
                self.transport.write(_framed(payload[:cut]))
                payload = payload[cut:]
        self.transport.write(_framed(payload) + (b"0\r\n\r\n" if last else b""))
