"""The replica's end: listens, admits ingresses that hold the secret, runs what they ask for."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from service.errors import BadRequest, EngineFailed, ServiceError
from service.link import delta as wire_delta
from service.link import frames
from service.link.frames import Frame, Kind
from service.link.handshake import REPLY, ReplicaSide
from service.link.wire import Wire
from service.types import Delta, EngineRequest

Generate = Callable[[EngineRequest], AsyncIterator[Delta]]
Call = Callable[[bytes], Awaitable[bytes]]
UNPROVED = 64
"""Connections that may be within their handshake at once; more are closed as they come."""

log = logging.getLogger("glm5.link")


class ReplicaLink:
    """Serves `generate` and `calls` (by name) to ingresses. `most_frame`: largest frame, bytes."""

    def __init__(self, secret: bytes, generate: Generate, calls: Mapping[str, Call], most_frame: int) -> None:
        self.secret, self.generate, self.calls, self.most_frame = secret, generate, calls, most_frame
        self._server: Any = None
        self._peers: set[_Peer] = set()

    async def listen(self, host: str) -> tuple[str, int]:
        """Open a free port on `host`; the address."""
        self._server = await asyncio.get_running_loop().create_server(self._peer, host, 0)
        address = self._server.sockets[0].getsockname()
        return str(address[0]), int(address[1])

    def _peer(self) -> _Peer:
        peer = _Peer(self)
        self._peers.add(peer)
        if sum(1 for each in self._peers if not each.proved) > UNPROVED:
            peer.unwanted = True
        return peer

    def forget(self, peer: _Peer) -> None:
        self._peers.discard(peer)

    @property
    def streams(self) -> int:
        """Calls that run."""
        return sum(len(peer.tasks) for peer in self._peers)

    async def close(self) -> None:
        """Take no more; end what runs."""
        if self._server is not None:
            self._server.close()
        tasks = [task for peer in self._peers for task in peer.tasks.values()]
        for peer in list(self._peers):
            peer.end("the replica stops")
        if tasks:
            await asyncio.wait(tasks, timeout=5.0)


class _Peer(Wire):
    """One ingress, or somebody who has yet to prove to be one."""

    def __init__(self, link: ReplicaLink) -> None:
        super().__init__(link.most_frame)
        self._link = link
        self._side = ReplicaSide(link.secret)
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.unwanted = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if self.unwanted:
            self.end("too many connections within their handshake")
        else:
            self.send_raw(self._side.greeting)

    def prove(self, opening: bytearray) -> bool:
        if len(opening) < REPLY:
            return False
        self.send_raw(self._side.check(bytes(opening[:REPLY])))
        del opening[:REPLY]
        return True

    def on_frame(self, frame: Frame) -> None:
        if frame.kind == Kind.CANCEL:
            if (task := self.tasks.get(frame.stream)) is not None:
                task.cancel()
            return
        if frame.stream in self.tasks:
            raise ValueError(f"stream {frame.stream} is in use")
        if frame.kind == Kind.GENERATE:
            work = self._generate(frame.stream, frames.unpack_request(frame.data))
        elif frame.kind == Kind.CALL:
            work = self._call(frame.stream, *frames.unpack_call(frame.data))
        else:
            raise ValueError(f"a frame of kind {frame.kind} from an ingress")
        task = self.tasks[frame.stream] = self._loop.create_task(work)
        task.add_done_callback(functools.partial(self._done, frame.stream))

    def on_end(self, why: str) -> None:
        """Nobody waits for what runs here any more."""
        self._link.forget(self)
        if self.tasks:
            log.warning("an ingress with %d requests is gone: %s", len(self.tasks), why)
        for task in self.tasks.values():
            task.cancel()

    async def _generate(self, stream: int, request: EngineRequest) -> None:
        source = self._link.generate(request)
        async with contextlib.aclosing(source):  # type: ignore[type-var]
            async for piece in source:
                self.send(frames.pack(Kind.DELTA, stream, wire_delta.pack(piece)))
        self.send(frames.pack(Kind.END, stream))

    async def _call(self, stream: int, method: str, body: bytes) -> None:
        call = self._link.calls.get(method)
        if call is None:
            raise BadRequest(f"the replica knows no call {method}")
        self.send(frames.pack(Kind.BYTES, stream, await call(body)))

    def _done(self, stream: int, task: asyncio.Task[None]) -> None:
        """An error is a frame too, so that its facts survive the journey."""
        self.tasks.pop(stream, None)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if not isinstance(error, ServiceError):
            log.error("a request failed by a fault of ours", exc_info=error)
            error = EngineFailed(f"the replica failed: {type(error).__name__}")
        self.send(frames.pack(Kind.ERROR, stream, frames.pack_error(error)))
