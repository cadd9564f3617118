"""One end of a connection: frames in, frames out, joined to one write for each turn of the loop."""

from __future__ import annotations

import asyncio
from typing import Any

from service.link.frames import BEAT, Frame, Splitter
from service.link.handshake import Refused
from service.link.heartbeat import LOOK_S, Heartbeat

OUT_BYTES = 64 << 20
"""What may wait to be sent. A peer that reads so slowly is stopped or gone; memory must not grow with it."""
HANDSHAKE_S = 5.0


class Wire(asyncio.Protocol):
    """Base of both ends. A subclass proves itself in `prove`, takes frames in `on_frame` and the end in `on_end`."""

    def __init__(self, most_frame: int) -> None:
        self._splitter = Splitter(most_frame)
        self._heart = Heartbeat()
        self._loop = asyncio.get_running_loop()
        # uvloop's transports are no asyncio.Transport.
        self._transport: Any = None
        self._out: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._opening = bytearray()
        self.proved = False
        self.ended = False

    # ------------------------------------------------------------------ for subclasses

    def prove(self, opening: bytearray) -> bool:
        """Take what belongs to the handshake off `opening`; True once both sides have proved themselves. May raise
        `Refused`."""
        raise NotImplementedError

    def on_frame(self, frame: Frame) -> None:
        """May raise ValueError where the peer breaks the protocol: the connection is ended."""
        raise NotImplementedError

    def on_end(self, why: str) -> None:
        """The connection is over, once; nothing can be sent or will come."""
        raise NotImplementedError

    # ------------------------------------------------------------------ sending

    def send(self, frame: bytes) -> None:
        """Send with all else that this turn of the loop brings. Nothing happens on a connection that has ended."""
        if self.ended:
            return
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(frame)

    def send_raw(self, data: bytes) -> None:
        """At once; for the handshake."""
        if not self.ended:
            self._transport.write(data)

    def _flush(self) -> None:
        if self.ended or not self._out:
            return
        self._write_out()
        self._heart.said()
        if self._transport.get_write_buffer_size() > OUT_BYTES:
            self.end(f"the peer does not read: {OUT_BYTES >> 20} MiB wait for it")

    def _write_out(self) -> None:
        out, self._out = self._out, []
        self._transport.write(b"".join(out))

    # ------------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._timer = self._loop.call_later(HANDSHAKE_S, self._late)

    def _late(self) -> None:
        self.end("the peer did not prove itself in time")

    def data_received(self, data: bytes) -> None:
        self._heart.heard()
        if not self.proved:
            self._opening += data
            try:
                proved = self.prove(self._opening)
            except Refused as refused:
                self.end(str(refused))
                return
            if not proved or self.ended:
                return
            self.proved = True
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_later(LOOK_S, self._look)
            data = bytes(self._opening)
            self._opening.clear()
            if not data:
                return
        try:
            for frame in self._splitter.feed(data):
                if frame.kind:
                    self.on_frame(frame)
        except ValueError as broken:
            self.end(f"the peer broke the protocol: {broken}")

    def _look(self) -> None:
        gone, due = self._heart.look()
        if gone:
            self.end("the peer is silent")
            return
        if due:
            self.send(BEAT)
        self._timer = self._loop.call_later(LOOK_S, self._look)

    def connection_lost(self, fault: Exception | None) -> None:
        self.end(str(fault) if fault else "the connection was closed")

    def end(self, why: str) -> None:
        """End the connection, from either side and for whatever reason."""
        if self.ended:
            return
        if self._out and not self._transport.is_closing():
            self._write_out()
        self.ended = True
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.close()
        self.on_end(why)
