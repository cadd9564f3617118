"""A shard: one spawned process that runs its share of a level and measures how busy it was itself.

Over the pipe. To the shard: `("go", start)`, `("stop",)`. From it: `("ready",)`, then `("live", Live)` four times a
second, and at last `("done", Result)`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import signal
import time
from array import array
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

from loadtest.client import Client
from loadtest.plan import Share
from loadtest.records import Record

_SAMPLE_S = 0.02
_LIVE_S = 0.25


@dataclass(frozen=True, slots=True)
class Live:
    """For the progress line. `events` are stream events, not tokens."""

    events: int
    active: int
    finished: int
    failed: int


@dataclass(frozen=True, slots=True)
class Pulse:
    """A shard's own load: at `times[i]`, `cpu[i]` seconds of CPU used so far, event loop late by `lag[i]` s."""

    times: array[float] = field(default_factory=lambda: array("d"))
    cpu: array[float] = field(default_factory=lambda: array("d"))
    lag: array[float] = field(default_factory=lambda: array("d"))


@dataclass(frozen=True, slots=True)
class Result:
    records: list[Record]
    pulse: Pulse
    gave_up: str = ""


def shard_main(pipe: Connection, share: Share) -> None:
    """Entry of the process. Ctrl-C is the parent's to handle: it sends `stop`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a socket a stream; the usual soft limit is 1024
    client = Client(share)
    pipe.send(("ready",))
    try:
        order = pipe.recv()
    except EOFError:
        return  # the parent is gone
    if order[0] != "go":
        return
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection over a million records would be a pause in every stream
    import uvloop

    result = uvloop.run(_run(pipe, client, order[1]))
    with contextlib.suppress(BrokenPipeError):
        pipe.send(("done", result))


async def _run(pipe: Connection, client: Client, start: float) -> Result:
    loop = asyncio.get_running_loop()
    pulse = Pulse()
    work = loop.create_task(client.run(start))

    watch = loop.create_task(_watch(pipe, client, pulse, work))
    try:
        await work
    except asyncio.CancelledError:
        pass
    finally:
        watch.cancel()
    return Result(client.records, pulse, client.gave_up)


async def _watch(pipe: Connection, client: Client, pulse: Pulse, work: asyncio.Task[None]) -> None:
    """Samples, progress, and orders. The pipe is polled, not given to the loop, which would make its sends partial."""
    next_live = perf_counter()
    while True:
        due = perf_counter() + _SAMPLE_S
        await asyncio.sleep(_SAMPLE_S)
        now = perf_counter()
        pulse.times.append(now)
        pulse.cpu.append(time.process_time())
        pulse.lag.append(max(now - due, 0.0))
        if pipe.poll():
            # `stop`, or the end of the pipe because the parent died: both end the work.
            work.cancel()
            return
        if now >= next_live:
            next_live = now + _LIVE_S
            live: tuple[str, Any] = ("live", Live(client.meter.events, client.active, client.finished, client.failed))
            with contextlib.suppress(BrokenPipeError):
                pipe.send(live)
