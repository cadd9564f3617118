"""GET /v1/service/live: the service as it runs, as server-sent events. However many look on, it is computed once."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict

import orjson
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.errors import NotReady, Overloaded, ServiceError
from service.http.backend import Backend
from service.http.envelope import error_event
from service.http.exchange import STREAM_HEADERS
from service.http.pulse import ClientStalled
from service.http.race import race
from service.metrics.live import LiveReadiness, LiveReading, LiveWatch

INTERVAL_S = 1.0
LIFE_S = 60.0
"""A viewer's stream ends after so long, and the page asks again: a process that is to end waits no longer for it."""
READ_S = 10.0
WRITE_S = 10.0
VIEWERS = 64


class Live:
    """Makes the figures once an interval while somebody looks, and never otherwise.

    A viewer gets each message that is made after it came, so never two in one interval; one that is slow to read skips
    what it missed. Neither viewers nor time make it larger.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._viewers = 0
        self._maker: asyncio.Task[None] | None = None
        self._next: asyncio.Future[bytes] | None = None

    def stream(self) -> LiveStream:
        """Raises Overloaded where too many look on."""
        if self._viewers >= VIEWERS:
            raise Overloaded(f"{VIEWERS} look on already, the most that one process serves", retry_after_s=LIFE_S)
        return LiveStream(self)

    async def follow(self, send: Send) -> None:
        """Send one viewer the messages until its time is up. Raises what making them raised, and ClientStalled."""
        self._viewers += 1
        ends = time.monotonic() + LIFE_S
        try:
            while time.monotonic() < ends:
                message = await asyncio.shield(self._coming())
                try:
                    async with asyncio.timeout(WRITE_S):
                        await send({"type": "http.response.body", "body": message, "more_body": True})
                except TimeoutError:
                    raise ClientStalled from None
        finally:
            self._viewers -= 1
            if not self._viewers and self._maker is not None:
                self._maker.cancel()
                self._maker = self._next = None

    def _coming(self) -> asyncio.Future[bytes]:
        """The next message. `_make` ends its wait, well or badly, within READ_S and an interval."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        if self._maker is None:
            self._maker = asyncio.create_task(self._make())
        return self._next

    async def _make(self) -> None:
        watch = LiveWatch()
        while True:
            try:
                message = await self._look(watch)
            except Exception as error:  # noqa: BLE001  the viewers raise it; the next one has it tried again
                self._maker, failed, self._next = None, self._next, None
                if failed is not None:
                    failed.set_exception(error)
                    failed.exception()  # a viewer that was writing meanwhile never asks for it
                return
            done, self._next = self._next, None
            if done is not None:
                done.set_result(message)
            await asyncio.sleep(INTERVAL_S)

    async def _look(self, watch: LiveWatch) -> bytes:
        try:
            async with asyncio.timeout(READ_S):
                text = await self._backend.metrics()
        except TimeoutError:
            raise NotReady(f"the service's figures took longer than {READ_S:g} s", retry_after_s=READ_S) from None
        now = self._backend.readiness()
        pools: dict[str, LiveReadiness] = {name: LiveReadiness(**asdict(pool)) for name, pool in now.pools.items()}
        figures = watch.look(LiveReading.of(text, time.monotonic()), time.time(), now.ready, pools)
        return b"data: " + orjson.dumps(figures) + b"\n\n"


class LiveStream(Response):
    """One viewer."""

    def __init__(self, live: Live) -> None:
        super().__init__()
        self._live = live

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": list(STREAM_HEADERS)})
        try:
            await race(receive, self._live.follow(send))
        except ClientStalled:
            raise ClientDisconnect from None
        except ServiceError as error:
            await send({"type": "http.response.body", "body": error_event(error), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
