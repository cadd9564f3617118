"""One HTTP/1.1 connection that streams answers and notes when bytes came.

Bare asyncio with llhttp: a read costs about a third of what a full client library takes, and the clock is read in the
callback of the socket, before any queue. No proxies, no redirects (a 3xx is an error like any other status).
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from time import perf_counter
from urllib.parse import urlsplit

import httptools

from loadtest.answer import Answer
from loadtest.sse import EventParser
from service.errors import UserError

_ERROR_BODY_BYTES = 2000


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send. `base` is the path before /v1, without a slash at its end."""

    host: str
    port: int
    tls: bool
    base: str
    api_key: str = ""

    @staticmethod
    def parse(url: str, api_key: str = "") -> Target:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"{url!r} is no server address: write it as http://HOST:PORT")
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise UserError(f"{url!r}: {error}") from error
        base = parts.path.rstrip("/").removesuffix("/v1")
        return Target(parts.hostname, port, parts.scheme == "https", base, api_key)

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.host}:{self.port}{self.base}"

    def post(self, path: str, body: bytes) -> bytes:
        """A whole request, ready for the socket."""
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        head = (
            f"POST {self.base}{path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n{key}"
            "Content-Type: application/json\r\nAccept: text/event-stream\r\nAccept-Encoding: identity\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


class Connection(asyncio.Protocol):
    """Carries one exchange at a time; reusable while `usable`."""

    def __init__(self, meter: Meter) -> None:
        self.usable = False
        self.used = False  # has carried an exchange before
        self._meter = meter
        self._transport: asyncio.Transport | None = None
        self._ended: asyncio.Future[None] | None = None
        self._answer: Answer | None = None

    # --- what a lane calls

    async def exchange(self, request: bytes, answer: Answer, timeout_s: float) -> None:
        """Send, and fill `answer` until its body ends or `timeout_s` passes. Faults become the answer's own.

        Cancelling closes the socket, so that the server can stop too.
        """
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        self._answer = answer
        self._events = EventParser()
        self._parser = httptools.HttpResponseParser(self)
        self._body = b""
        self._until_close = True  # neither chunked nor of known length
        self._stream = False
        self._headed = False
        self._now = perf_counter()
        timer = loop.call_later(timeout_s, self._timed_out)
        self._transport.write(request)
        try:
            await self._ended
        except asyncio.CancelledError:
            self.abort()
            raise
        finally:
            timer.cancel()
            self._answer = None
            self.used = True
            if answer.record.error:
                self.abort()

    def abort(self) -> None:
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self.usable = True

    def data_received(self, data: bytes) -> None:
        self._now = perf_counter()
        if self._answer is None or self._ended is None or self._ended.done():
            return  # bytes that nobody waits for
        self._meter.reads += 1
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail("not_a_stream", f"not HTTP: {error}")
            self._finish()

    def connection_lost(self, error: Exception | None) -> None:
        self.usable = False
        if self._answer is None:
            return
        self._now = perf_counter()
        if not self._headed:
            self._fail("connect", f"closed before an answer: {error or 'end of stream'}")
        elif error is not None or not self._until_close:
            self._fail("disconnect", str(error or "closed inside the body"))
        self._finish()

    # --- llhttp

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._until_close = False
        elif name == b"content-type":
            self._stream = value.lower().startswith(b"text/event-stream")

    def on_headers_complete(self) -> None:
        assert self._answer is not None
        self._headed = True
        self._answer.record.status = self._parser.get_status_code()
        self._stream = self._stream and self._answer.record.status == 200

    def on_body(self, body: bytes) -> None:
        answer = self._answer
        if answer is None:
            return
        if self._stream:
            for event in self._events.feed(body):
                answer.take(self._now, event)
                self._meter.events += 1
        elif len(self._body) < _ERROR_BODY_BYTES:
            self._body += body

    def on_message_complete(self) -> None:
        self.usable = self.usable and self._parser.should_keep_alive()
        self._finish()

    # --- endings

    def _fail(self, kind: str, detail: str) -> None:
        if self._answer is not None:
            self._answer.fail(kind, detail)

    def _timed_out(self) -> None:
        self._now = perf_counter()
        self._fail("timeout", "" if self._headed else "no answer at all")
        self._finish()

    def _finish(self) -> None:
        answer = self._answer
        if answer is None or self._ended is None or self._ended.done():
            return
        if self._stream:
            for event in self._events.close():
                answer.take(self._now, event)
        elif self._headed:
            text = self._body.decode(errors="replace")
            if answer.record.status == 200:
                answer.fail("not_a_stream", text)
            else:
                answer.fail("http", text)
        answer.settle(self._now)
        self._ended.set_result(None)


@dataclass(slots=True)
class Meter:
    """Live counts of a shard, for the progress line only."""

    reads: int = 0
    events: int = 0


async def connect(target: Target, meter: Meter, timeout_s: float) -> Connection:
    """Raises OSError or TimeoutError."""
    loop = asyncio.get_running_loop()
    context = ssl.create_default_context() if target.tls else None
    async with asyncio.timeout(timeout_s):
        _, connection = await loop.create_connection(lambda: Connection(meter), target.host, target.port, ssl=context)
    return connection
