"""One generation on the wire: drive the backend, write the answer, let go of the work the moment it has no reader."""

from __future__ import annotations

import asyncio
import contextlib
import time

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.errors import DeadlineExceeded, EngineFailed
from service.http.backend import Backend, Served
from service.http.envelope import as_service_error, error_event
from service.http.frames import KEEPALIVE, Framer, last_frames
from service.http.plan import Part, Plan
from service.http.pulse import ClientStalled, Pulse
from service.http.race import race, together
from service.http.settings import HttpSettings
from service.http.usage import Usage
from service.http.whole import Fold, whole_answer

STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
LAST_WRITE_S = 5.0


class Exchange(Response):
    """The answer to a plan. Up to its first byte, errors are raised, so that they become an HTTP status."""

    def __init__(self, backend: Backend, settings: HttpSettings, plan: Plan) -> None:
        super().__init__()
        self._backend = backend
        self._settings = settings
        self._plan = plan
        self._created = int(time.time())
        self._served: dict[int, Served] = {}

    def _how_served(self, part: Part) -> Served:
        served = self._served.get(part.index)
        assert served is not None, "a backend says how it serves a request before its first delta"
        return served

    def _serving_headers(self) -> list[tuple[bytes, bytes]]:
        """Where the request went, as far as that is known; nothing while it waits."""
        if not self._served:
            return []
        pools = ",".join(sorted({served.pool for served in self._served.values()}))
        queue_ms = 1000 * max(served.queue_s for served in self._served.values())
        return [(b"x-glm-pool", pools.encode()), (b"x-glm-queue-ms", b"%.1f" % queue_ms)]


class WholeAnswer(Exchange):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        plan = self._plan
        try:
            async with asyncio.timeout(plan.timeout_s):
                folds = await race(receive, together([self._fold(part) for part in plan.parts]))
        except TimeoutError:
            raise DeadlineExceeded(f"the request took longer than its {plan.timeout_s:g} s") from None
        body = whole_answer(plan, folds, tier=self._how_served(plan.parts[0]).tier, created=self._created)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *self._serving_headers(),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _fold(self, part: Part) -> Fold:
        fold: Fold | None = None
        async with contextlib.aclosing(self._backend.generate(part.request, self._plan.context)) as items:
            async for item in items:
                if isinstance(item, Served):
                    # Nothing has been sent yet: an answer that was lost on its way begins anew.
                    self._served[part.index], fold = item, None
                    continue
                if fold is None:
                    fold = Fold(self._plan, part)
                fold.feed(item)
        if fold is None:
            raise EngineFailed("the engine ended without an answer")
        fold.close()
        return fold


class StreamAnswer(Exchange):
    """Server-sent events. All writes go through `_write`, one at a time."""

    def __init__(self, backend: Backend, settings: HttpSettings, plan: Plan) -> None:
        super().__init__(backend, settings, plan)
        self._clock = asyncio.get_running_loop().time
        self._pulse = Pulse(started_at=self._clock(), timeout_s=plan.timeout_s)
        self._lock = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await race(receive, self._pump(send), self._tend(send))
        except ClientStalled:
            raise ClientDisconnect from None
        except Exception as error:
            if self._pulse.sent_at is None or isinstance(error, ClientDisconnect):
                raise
            await self._write_last(send, error_event(as_service_error(error)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pump(self, send: Send) -> None:
        usages = await together([self._drain(part, send) for part in self._plan.parts])
        tier = self._how_served(self._plan.parts[0]).tier
        await self._write(send, last_frames(self._plan, usages, tier=tier, created=self._created))

    async def _drain(self, part: Part, send: Send) -> tuple[int, Usage]:
        framer: Framer | None = None
        pulse, clock = self._pulse, self._clock
        async with contextlib.aclosing(self._backend.generate(part.request, self._plan.context)) as items:
            async for item in items:
                if isinstance(item, Served):
                    self._served[part.index] = item
                    pulse.served_at = clock()
                    continue
                if framer is None:
                    framer = Framer(self._plan, part, tier=self._how_served(part).tier, created=self._created)
                if frames := framer.feed(item):
                    await self._write(send, frames)
                pulse.heard_at = clock()
        if framer is None:
            raise EngineFailed("the engine ended without an answer")
        return framer.close()

    async def _write(self, send: Send, data: bytes) -> None:
        pulse = self._pulse
        async with self._lock:
            pulse.writing = True
            try:
                if pulse.sent_at is None:
                    pulse.sent_at = self._clock()
                    headers = [*STREAM_HEADERS, *self._serving_headers()]
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": data, "more_body": True})
                pulse.sent_at = self._clock()
            finally:
                pulse.writing = False

    async def _write_last(self, send: Send, data: bytes) -> None:
        """Write when nobody watches the client any more: it may have stopped reading, so not for ever."""
        try:
            async with asyncio.timeout(LAST_WRITE_S):
                await self._write(send, data)
        except TimeoutError:
            raise ClientDisconnect from None

    async def _tend(self, send: Send) -> None:
        """Keep the client's connection alive; raise when a deadline has passed."""
        while True:
            speak, again_at = self._pulse.judge(self._clock(), self._settings)
            if speak:
                await self._write(send, KEEPALIVE)
            await asyncio.sleep(max(0.001, again_at - self._clock()))


def answer(backend: Backend, settings: HttpSettings, plan: Plan) -> Exchange:
    return (StreamAnswer if plan.stream else WholeAnswer)(backend, settings, plan)
