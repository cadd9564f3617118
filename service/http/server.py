"""The socket: uvicorn's HTTP/1.1 over it, with the bounds and the manners that uvicorn leaves to a proxy.

Several processes may hold one port (SO_REUSEPORT): the kernel deals connections out among them, and a new process takes
its part while an old one ends. Every refusal here is the error envelope, like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from service.errors import BadRequest, HeadersTooLarge, NotReady, RequestTimeout, ServiceError
from service.http.envelope import error_response, new_request_id
from service.http.settings import HttpSettings

BACKLOG = 2048
LINGER_S = 2.0
"""After a refusal, what the client still sends is read and dropped for so long: a socket that is closed over unread
bytes is reset, and the refusal with it."""
LINGER_BYTES = 64 << 20


class HttpServer:
    """Serves `app` on the address of `settings`, from the present event loop."""

    def __init__(self, app: ASGIApp, settings: HttpSettings) -> None:
        self.settings = settings
        self.uvicorn = uvicorn.Config(
            app,
            http=_Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=settings.keep_connection_s,  # type: ignore[arg-type]  # goes to call_later
        )
        self.uvicorn.load()
        self.state = ServerState()
        self._server: Any = None

    async def start(self) -> int:
        """Listen; returns the port. Raises OSError where the address cannot be had."""
        listener = listen(self.settings.host, self.settings.port)
        self._server = await asyncio.get_running_loop().create_server(lambda: _Connection(self), sock=listener)
        return int(listener.getsockname()[1])

    @property
    def serving(self) -> bool:
        return self._server is not None and bool(self._server.is_serving())

    async def stop(self, within_s: float) -> None:
        """Take no more connections or requests, let those that run end, up to `within_s`; then cut the rest."""
        if self._server is not None:
            self._server.close()
        for connection in list(self.state.connections):
            connection.shutdown()
        if self.state.tasks:
            await asyncio.wait(self.state.tasks, timeout=within_s)
        for connection in list(self.state.connections):
            connection.transport.abort()
        for task in list(self.state.tasks):
            task.cancel()
        if self.state.tasks:
            await asyncio.wait(self.state.tasks, timeout=LINGER_S)


def listen(host: str, port: int) -> socket.socket:
    """A bound socket that other processes of this user may share the port of."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


class _Connection(HttpToolsProtocol):
    """One connection: uvicorn's, with limits on what comes before an application is asked."""

    transport: Any  # uvloop's are no asyncio.Transport

    def __init__(self, server: HttpServer) -> None:
        super().__init__(server.uvicorn, server.state, {})
        self._settings = server.settings
        self._in_head = True
        self._head_bytes = 0
        self._began_here = True
        """The request whose head is being read began in the bytes that are being fed now."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._refused = False
        self._dropped = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        most = self._settings.max_connections
        if len(self.connections) > most:
            self._refuse(NotReady(f"this process holds {most} connections, its most", retry_after_s=1.0))
            return
        self._time_head()

    def _time_head(self) -> None:
        self._head_timer = self.loop.call_later(self._settings.header_timeout_s, self._head_late)

    def _untime_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_late(self) -> None:
        self._head_timer = None
        if self._head_bytes:
            seconds = self._settings.header_timeout_s
            self._refuse(RequestTimeout(f"the request's headers did not arrive within {seconds:g} s"))
        else:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        most = self._settings.max_header_bytes
        while data and not self._refused and not self.transport.is_closing():
            if not self._in_head:
                piece, data = data, b""
            else:
                room = max(1, most - self._head_bytes)
                piece, data = data[:room], data[room:]
            self._began_here = False
            in_head = self._in_head
            super().data_received(piece)
            if self._in_head and not self._refused:
                if in_head and not self._began_here:
                    self._head_bytes += len(piece)
                if self._head_timer is None:
                    self._time_head()
                if self._head_bytes >= most:
                    self._refuse(HeadersTooLarge(f"the request's headers are larger than {most} bytes"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._in_head:
            self._in_head, self._head_bytes, self._began_here = True, 1, True

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._untime_head()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self.cycle.response_complete:
            self._dropped += len(body)
            if self._dropped > LINGER_BYTES:
                self.transport.close()
        super().on_body(body)

    def on_response_complete(self) -> None:
        self._dropped = 0
        super().on_response_complete()

    def connection_lost(self, fault: Exception | None) -> None:
        self._untime_head()
        super().connection_lost(fault)

    def eof_received(self) -> None:
        # A client that has sent its request and shuts down its half still wants the answer; one that was refused is
        # done with.
        if self._refused:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Uvicorn calls this for what is no HTTP."""
        self._refuse(BadRequest("this is no valid HTTP/1.1 request"))

    def _refuse(self, error: ServiceError) -> None:
        """Say why, and end the connection without a reset."""
        if self._refused:
            return
        self._refused = True
        self._untime_head()
        self._unset_keepalive_if_required()
        transport = self.transport
        if self.cycle is not None and not self.cycle.response_complete:
            # An answer is under way on this connection: nothing can be said between its bytes.
            transport.close()
            return
        answer = error_response(error, {"path": ""}, headers={"x-request-id": new_request_id()})
        lines = [STATUS_LINE[answer.status_code]]
        lines += [name + b": " + value + b"\r\n" for name, value in answer.raw_headers]
        transport.write(b"".join([*lines, b"connection: close\r\n\r\n", bytes(answer.body)]))
        with contextlib.suppress(OSError, RuntimeError):
            transport.write_eof()
        self.loop.call_later(LINGER_S, transport.close)
