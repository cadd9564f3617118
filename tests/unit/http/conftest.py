from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import uvicorn

from service.http.app import create_app
from service.http.settings import HttpSettings
from tests.unit.http.echo import EchoBackend


@dataclass
class Served:
    """A real server on loopback over an echo backend."""

    backend: EchoBackend
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def settled(self, condition: Callable[[], bool], within_s: float = 10.0) -> None:
        async with asyncio.timeout(within_s):
            while not condition():
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def serving(backend: EchoBackend, *, aliases: tuple[str, ...] = (), **settings: Any) -> AsyncIterator[Served]:
    listener = socket.create_server(("127.0.0.1", 0))
    app = create_app(backend, HttpSettings(**settings), aliases=aliases)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    async with asyncio.timeout(10):
        while not server.started:
            await asyncio.sleep(0.005)
    try:
        yield Served(backend, listener.getsockname()[1])
    finally:
        server.should_exit = True
        async with asyncio.timeout(10):
            await task
        listener.close()


@contextlib.asynccontextmanager
async def calling(backend: EchoBackend, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the app without a network between."""
    transport = httpx.ASGITransport(create_app(backend, HttpSettings(**settings)))
    async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
        yield client


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with calling(EchoBackend()) as found:
        yield found


@pytest.fixture
async def server() -> AsyncIterator[Served]:
    async with serving(EchoBackend()) as found:
        yield found


def ask(content: str, **fields: Any) -> dict[str, Any]:
    return {"model": "echo", "messages": [{"role": "user", "content": content}], **fields}
