"""Sending requests: the closed loop (lanes) and the open loop (arrivals) of one shard, on one event loop."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass, field
from time import perf_counter

import orjson

from loadtest.answer import Answer
from loadtest.plan import Share
from loadtest.prompts import Prompt, Writer
from loadtest.records import CANCELLED, Record
from loadtest.wire import Connection, Meter, connect

_BACKOFF_S = 0.05
_BACKOFF_MAX_S = 2.0
_GIVE_UP = 12  # failures of one lane in a row, without any success of the shard


@dataclass
class Client:
    """State of one shard's level. `records` grows as requests end, also when the level is cancelled."""

    share: Share
    meter: Meter = field(default_factory=Meter)
    records: list[Record] = field(default_factory=list)
    active: int = 0
    failed: int = 0
    finished: int = 0  # measured requests that ended
    gave_up: str = ""

    def __post_init__(self) -> None:
        work = self.share.workload
        self._writer = Writer(work.seed, work.shared_words)
        self._next = self.share.first_number
        self._left = max(self.share.requests - len(self.share.lanes), 0)  # each lane has one of its own
        self._idle: list[Connection] = []
        self._measuring: set[int] = set()
        self._deadline: float | None = None
        self._any_success = False

    async def run(self, start: float) -> None:
        """Begin at `start` (perf_counter) and return when all is sent and answered. Cancel to stop early."""
        async with asyncio.TaskGroup() as tasks:
            if self.share.level.open_loop:
                for offset, warm in self.share.arrivals:
                    due = start + offset
                    await _sleep_until(due)
                    tasks.create_task(self._arrival(due, warm))
            else:
                level = self.share.level
                for lane in self.share.lanes:
                    begin = start + level.ramp_s * lane / level.concurrency
                    tasks.create_task(self._lane(lane, begin))
        for connection in self._idle:
            connection.abort()

    # --- closed loop

    async def _lane(self, lane: int, begin: float) -> None:
        await _sleep_until(begin)
        connection: Connection | None = None
        failures = 0
        done = 0
        try:
            while not self.gave_up:
                warm = done < self.share.level.warmup
                if not warm and not self._may_measure(lane):
                    return
                done += 1
                record, connection = await self._one(lane, warm, None, connection)
                if record.ok:
                    failures, self._any_success = 0, True
                    continue
                # A refused request is quick: without a pause, failures would crowd out the real ones.
                failures += 1
                if failures >= _GIVE_UP and not self._any_success:
                    self.gave_up = f"{failures} failures in a row: {record.error} {record.status or ''} {record.detail}"
                await asyncio.sleep(min(_BACKOFF_S * 2 ** min(failures, 10), _BACKOFF_MAX_S))
        finally:
            if connection is not None:
                connection.abort()

    def _may_measure(self, lane: int) -> bool:
        level = self.share.level
        first = lane not in self._measuring
        self._measuring.add(lane)
        if not level.requests:
            if len(self._measuring) == len(self.share.lanes) and self._deadline is None:
                self._deadline = perf_counter() + level.duration_s
            return first or self._deadline is None or perf_counter() < self._deadline
        if first:
            return True
        if self._left <= 0:
            return False
        self._left -= 1
        return True

    # --- open loop

    async def _arrival(self, due: float, warm: bool) -> None:
        connection = None
        while self._idle and connection is None:
            kept = self._idle.pop()
            connection = kept if kept.usable else None
        _, connection = await self._one(-1, warm, due, connection)
        if connection is not None and connection.usable:
            self._idle.append(connection)

    # --- one request

    async def _one(
        self, lane: int, warm: bool, due: float | None, connection: Connection | None
    ) -> tuple[Record, Connection | None]:
        number, self._next = self._next, self._next + 1
        prompt = self._prompt(number)
        request = self.share.target.post(self.share.workload.path, orjson.dumps(self.share.workload.body(prompt)))
        timeout_s = self.share.level.timeout_s
        self.active += 1
        record = self._blank(number, lane, warm, due, prompt)
        try:
            for _ in range(2):
                answer = Answer(record)
                if connection is None or not connection.usable:
                    connection = await self._connect(answer, timeout_s)
                    if connection is None:
                        break
                reused = connection.used
                await connection.exchange(request, answer, timeout_s)
                # A server may close a kept connection just as the next request is written; that is nobody's fault.
                if not (reused and record.error == "connect"):
                    break
                record = self._blank(number, lane, warm, due, prompt)
        except asyncio.CancelledError:
            answer.fail(CANCELLED)
            answer.settle(perf_counter())
            raise
        finally:
            self.active -= 1
            self.records.append(record)
            self.finished += not warm
            self.failed += bool(record.error and record.error != CANCELLED)
        return record, connection

    def _blank(self, number: int, lane: int, warm: bool, due: float | None, prompt: Prompt) -> Record:
        now = perf_counter()
        asked = prompt.max_tokens or self.share.workload.output_tokens
        return Record(number, lane, warm, now if due is None else due, now, asked_tokens=asked)

    async def _connect(self, answer: Answer, timeout_s: float) -> Connection | None:
        try:
            return await connect(self.share.target, self.meter, timeout_s)
        except TimeoutError:
            answer.fail("timeout", "connecting")
        except (OSError, ssl.SSLError) as error:
            answer.fail("connect", str(error))
        answer.settle(perf_counter())
        return None

    def _prompt(self, number: int) -> Prompt:
        work, level = self.share.workload, self.share.level
        if work.dataset:
            # In order, from another place for each level and shard, so that few prompts come twice.
            start = level.index * 4099 + number // 1_000_000 * 7919
            return work.dataset[(start + number % 1_000_000) % len(work.dataset)]
        return Prompt(self._writer.prompt(f"{level.index} {level.repeat} {number}", work.words))


async def _sleep_until(moment: float) -> None:
    # Again and again, because the loop's timers are whole milliseconds and may fire up to half of one early.
    while (delay := moment - perf_counter()) > 0:  # noqa: ASYNC110 - waits for a moment, not for an event
        await asyncio.sleep(delay)
