"""The ingress's end: one connection to each replica, and the calls that run over it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from service.errors import EngineFailed, ReplicaLost, ServiceError
from service.link import delta as wire_delta
from service.link import frames
from service.link.frames import Frame, Kind
from service.link.handshake import GREETING, PROOF, IngressSide
from service.link.wire import HANDSHAKE_S, Wire
from service.types import Delta, EngineRequest

STREAM_BYTES = 4 << 20
"""What one stream may hold for a client that does not read: more than any answer that is read at all."""
CONNECT_S = 3.0
AGAIN_S = 0.25
"""Pause before a replica that could not be reached is tried again."""

log = logging.getLogger("glm5.link")


class _Stream:
    """One call: frames that have come and were not read yet."""

    __slots__ = ("bytes", "frames", "lost", "wake")

    def __init__(self) -> None:
        self.frames: deque[Frame] = deque()
        self.bytes = 0
        self.wake: asyncio.Future[None] | None = None
        self.lost: ServiceError | None = None

    def put(self, frame: Frame) -> None:
        self.frames.append(frame)
        self.bytes += len(frame.data)
        self.notify()

    def notify(self) -> None:
        if self.wake is not None and not self.wake.done():
            self.wake.set_result(None)

    async def next(self, loop: asyncio.AbstractEventLoop) -> Frame:
        """Raises the error that ended the connection, after all that came before it."""
        while not self.frames:
            if self.lost is not None:
                raise self.lost
            self.wake = loop.create_future()
            try:
                await self.wake
            finally:
                self.wake = None
        frame = self.frames.popleft()
        self.bytes -= len(frame.data)
        return frame


class Link(Wire):
    """A connection to one replica."""

    def __init__(self, replica: str, secret: bytes, most_frame: int) -> None:
        super().__init__(most_frame)
        self.replica = replica
        self._side = IngressSide(secret)
        self._greeted = False
        self._streams: dict[int, _Stream] = {}
        self._last = 0
        self.ready: asyncio.Future[None] = self._loop.create_future()
        """Done when both have proved themselves, or with what went wrong."""
        self._over = asyncio.Event()

    async def over(self) -> None:
        """Until the connection has ended."""
        await self._over.wait()

    @property
    def in_hand(self) -> int:
        """Calls that run."""
        return len(self._streams)

    def prove(self, opening: bytearray) -> bool:
        if not self._greeted:
            if len(opening) < GREETING:
                return False
            self.send_raw(self._side.reply(bytes(opening[:GREETING])))
            del opening[:GREETING]
            self._greeted = True
        if len(opening) < PROOF:
            return False
        self._side.check(bytes(opening[:PROOF]))
        del opening[:PROOF]
        if not self.ready.done():
            self.ready.set_result(None)
        return True

    def on_frame(self, frame: Frame) -> None:
        stream = self._streams.get(frame.stream)
        if stream is None:
            return  # what was on its way when the call was given up
        if stream.bytes > STREAM_BYTES:
            stream.frames.clear()
            stream.bytes = 0
            stream.lost = EngineFailed(f"the client reads too slowly: {STREAM_BYTES >> 20} MiB wait for it")
            self._streams.pop(frame.stream)
            self.send(frames.pack(Kind.CANCEL, frame.stream))
            stream.notify()
            return
        stream.put(frame)

    def on_end(self, why: str) -> None:
        self._over.set()
        if not self.ready.done():
            self.ready.set_exception(ConnectionError(why))
            self.ready.exception()  # whoever waits for it still gets it; nobody may
        in_hand = len(self._streams)
        if in_hand:
            log.warning("replica %s was lost with %d requests in hand: %s", self.replica, in_hand, why)
        for stream in self._streams.values():
            stream.lost = ReplicaLost("the replica was lost while it held this request", in_hand=in_hand)
            stream.notify()
        self._streams.clear()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Delta, None]:
        """The answer. Leaving early cancels it there. Raises ServiceError, of which ReplicaLost may be sent on."""
        async with contextlib.aclosing(self._ask(Kind.GENERATE, frames.pack_request(request))) as answers:
            async for frame in answers:
                yield wire_delta.unpack(frame.data)

    async def call(self, method: str, body: bytes) -> bytes:
        """Raises ServiceError."""
        async with contextlib.aclosing(self._ask(Kind.CALL, frames.pack_call(method, body))) as answers:
            async for frame in answers:
                return frame.data
        raise EngineFailed(f"the replica answered nothing to {method}")

    async def _ask(self, kind: Kind, data: bytes) -> AsyncGenerator[Frame, None]:
        if self.ended:
            raise ReplicaLost("the replica is gone", in_hand=0)
        self._last += 1
        number, stream = self._last, _Stream()
        self._streams[number] = stream
        self.send(frames.pack(kind, number, data))
        over = False
        try:
            while True:
                frame = await stream.next(self._loop)
                if frame.kind == Kind.END:
                    over = True
                    return
                if frame.kind == Kind.ERROR:
                    over = True
                    raise frames.unpack_error(frame.data)
                over = frame.kind == Kind.BYTES
                yield frame
        finally:
            if self._streams.pop(number, None) is not None and not over:
                self.send(frames.pack(Kind.CANCEL, number))


class Links:
    """Connections to all replicas that are known, made as they appear and made again when they break."""

    def __init__(self, secret: bytes, most_frame: int) -> None:
        self._secret, self._most_frame = secret, most_frame
        self._links: dict[str, Link] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def get(self, replica: str) -> Link | None:
        """The connection to a replica, where there is one that works."""
        link = self._links.get(replica)
        return link if link is not None and link.proved and not link.ended else None

    @property
    def linked(self) -> set[str]:
        """Replicas with a connection that works."""
        return {id for id in self._links if self.get(id) is not None}

    def follow(self, addresses: Mapping[str, tuple[str, int]]) -> None:
        """Keep a connection to each of these; end those to others once nothing runs there. Call from the loop."""
        for replica in [id for id in self._tasks if id not in addresses]:
            link = self._links.get(replica)
            if link is not None and link.in_hand and not link.ended:
                continue  # what runs there does not depend on anybody's word
            self._tasks.pop(replica).cancel()
            if (link := self._links.pop(replica, None)) is not None:
                link.end("the replica is not known any more")
        for replica, address in addresses.items():
            if replica not in self._tasks:
                self._tasks[replica] = asyncio.create_task(self._hold(replica, address))

    async def _hold(self, replica: str, address: tuple[str, int]) -> None:
        """Connect; connect again whenever the connection is over, until cancelled."""
        while True:
            with contextlib.suppress(OSError, TimeoutError):
                link = await self._connect(replica, address)
                self._links[replica] = link
                await link.over()
            await asyncio.sleep(AGAIN_S)

    async def _connect(self, replica: str, address: tuple[str, int]) -> Link:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_S):
            made: Any = await loop.create_connection(lambda: Link(replica, self._secret, self._most_frame), *address)
        link: Link = made[1]
        async with asyncio.timeout(HANDSHAKE_S):
            await link.ready
        return link

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        for link in list(self._links.values()):
            link.end("the ingress stops")
