"""One generation on the wire: drive the backend, write the answer, let go of the work the moment it has no reader."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.errors import DeadlineExceeded, EngineFailed, ServiceError
from service.http.backend import Backend, Served
from service.http.dialects.dialect import Dialect, Framer
from service.http.dialects.fold import Fold
from service.http.envelope import as_service_error, request_id
from service.http.plan import Part, Plan
from service.http.pulse import ClientStalled, Pulse
from service.http.race import race, together
from service.http.settings import HttpSettings

STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
LAST_WRITE_S = 5.0
MOST_NAMES = 64
"""In x-glm-ignored: a body may hold thousands of unknown keys, and clients refuse an answer with a long head."""
_UNFIT = re.compile(r"[^ -~]")


class Exchange(Response):
    """The answer to a plan. Up to its first byte, errors are raised, so that they become an HTTP status."""

    def __init__(self, backend: Backend, settings: HttpSettings, plan: Plan, dialect: Dialect) -> None:
        super().__init__()
        self._backend = backend
        self._settings = settings
        self._plan = plan
        self._dialect = dialect
        self._created = int(time.time())
        self._served: dict[int, Served] = {}

    def _how_served(self, part: Part) -> Served:
        served = self._served.get(part.index)
        assert served is not None, "a backend says how it serves a request before its first delta"
        return served

    def _answer_headers(self) -> list[tuple[bytes, bytes]]:
        """What was taken and changes nothing; where the request went, as far as that is known."""
        ignored = [(b"x-glm-ignored", _listed(self._plan.ignored))] if self._plan.ignored else []
        if not self._served:
            return ignored
        pools = ",".join(sorted({served.pool for served in self._served.values()}))
        queue_ms = 1000 * max(served.queue_s for served in self._served.values())
        return [*ignored, (b"x-glm-pool", pools.encode()), (b"x-glm-queue-ms", b"%.1f" % queue_ms)]


def _listed(names: tuple[str, ...]) -> bytes:
    """As a header's value. Keys of the client's own JSON may hold anything, line ends too, and be many."""
    text = _UNFIT.sub("?", ", ".join(names[:MOST_NAMES]))
    return (text if len(names) <= MOST_NAMES else f"{text}, ...").encode()


class WholeAnswer(Exchange):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        plan = self._plan
        try:
            async with asyncio.timeout(plan.timeout_s):
                folds = await race(receive, together([self._fold(part) for part in plan.parts]))
        except TimeoutError:
            raise DeadlineExceeded(f"the request took longer than its {plan.timeout_s:g} s") from None
        except ServiceError as error:
            raise self._dialect.explain(error) from None
        body = self._dialect.whole(plan, folds, tier=self._how_served(plan.parts[0]).tier, created=self._created)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *self._answer_headers(),
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

    def __init__(self, backend: Backend, settings: HttpSettings, plan: Plan, dialect: Dialect) -> None:
        super().__init__(backend, settings, plan, dialect)
        self._framers: dict[int, Framer] = {}
        self._clock = asyncio.get_running_loop().time
        self._pulse = Pulse(started_at=self._clock(), timeout_s=plan.timeout_s)
        self._lock = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await race(receive, self._pump(send), self._tend(send))
        except ClientStalled:
            raise ClientDisconnect from None
        except Exception as error:
            if self._pulse.sent_at is None and isinstance(error, ServiceError):
                raise self._dialect.explain(error) from None
            if self._pulse.sent_at is None or isinstance(error, ClientDisconnect):
                raise
            framers = list(self._framers.values())
            told = self._dialect.explain(as_service_error(error))
            last = self._dialect.broken(self._plan, framers, told, request_id=request_id(scope))
            await self._write_last(send, last)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pump(self, send: Send) -> None:
        framers = await together([self._drain(part, send) for part in self._plan.parts])
        tier = self._how_served(self._plan.parts[0]).tier
        await self._write(send, self._dialect.last(self._plan, framers, tier=tier, created=self._created))

    async def _drain(self, part: Part, send: Send) -> Framer:
        framer: Framer | None = None
        pulse, clock = self._pulse, self._clock
        async with contextlib.aclosing(self._backend.generate(part.request, self._plan.context)) as items:
            async for item in items:
                if isinstance(item, Served):
                    self._served[part.index] = item
                    pulse.served_at = clock()
                    continue
                if framer is None:
                    tier = self._how_served(part).tier
                    framer = self._dialect.framer(self._plan, part, tier=tier, created=self._created)
                    self._framers[part.index] = framer
                if frames := framer.feed(item):
                    await self._write(send, frames)
                pulse.heard_at = clock()
        if framer is None:
            raise EngineFailed("the engine ended without an answer")
        framer.close()
        return framer

    async def _write(self, send: Send, data: bytes) -> None:
        pulse = self._pulse
        async with self._lock:
            pulse.writing = True
            try:
                if pulse.sent_at is None:
                    pulse.sent_at = self._clock()
                    headers = [*STREAM_HEADERS, *self._answer_headers()]
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
                await self._write(send, self._dialect.keepalive)
            await asyncio.sleep(max(0.001, again_at - self._clock()))


def answer(backend: Backend, settings: HttpSettings, plan: Plan, dialect: Dialect) -> Exchange:
    return (StreamAnswer if plan.stream else WholeAnswer)(backend, settings, plan, dialect)
