"""What is kept of one request. All times are seconds of `time.perf_counter`, one clock for all shards of a machine."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from service.errors import UserError

CANCELLED = "cancelled"
"""Not a fault of the server: Ctrl-C, or a level given up. Counted apart from errors."""

ERRORS = (
    "connect",  # no connection, or it broke before the response's head
    "http",  # a status other than 200; `status` says which
    "error_event",  # an error object inside a 200 stream
    "truncated_json",  # a data line that is no JSON
    "malformed",  # JSON with a field of another type than the protocol's
    "failed_finish",  # finish_reason error or abort: the server gave the request up
    "not_a_stream",  # 200 but no event stream
    "disconnect",  # the socket closed inside the body
    "missing_done",  # the body ended well, without [DONE]
    "empty",  # no token at all
    "no_usage",  # an answer without token counts: it cannot be measured
    "timeout",
)


@dataclass(slots=True)
class Record:
    """One request as the client saw it.

    `scheduled` is when it should have been sent (open loop) and equals `sent` in a closed loop; latencies count from
    `scheduled`. `times[i]` is the arrival of content chunk i, which carries `tokens[i]` tokens (sum = `output_tokens`,
    from the server's usage). `last` is the arrival of the last content chunk, `end` of the body's end.
    """

    number: int
    lane: int
    warmup: bool
    scheduled: float
    sent: float
    end: float = 0.0
    status: int = 0
    error: str = ""
    detail: str = ""
    finish: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    asked_tokens: int = 0
    first_answer: float = 0.0  # first chunk that is not reasoning; 0: none came
    times: array[float] = field(default_factory=lambda: array("d"))
    tokens: array[float] = field(default_factory=lambda: array("d"))

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def first(self) -> float:
        return self.times[0]

    @property
    def last(self) -> float:
        return self.times[-1]

    @property
    def ttft(self) -> float:
        return self.times[0] - self.scheduled

    @property
    def e2el(self) -> float:
        return self.times[-1] - self.scheduled

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None for answers of one token."""
        if self.output_tokens < 2:
            return None
        return (self.times[-1] - self.times[0]) / (self.output_tokens - 1)


def to_json(record: Record, level: int, origin: float) -> dict[str, Any]:
    """A line of requests.jsonl: seconds since `origin`; chunk times as milliseconds since `sent`, to 1 µs."""
    line: dict[str, Any] = {
        "level": level,
        "number": record.number,
        "lane": record.lane,
        "warmup": record.warmup,
        "scheduled": round(record.scheduled - origin, 6),
        "sent": round(record.sent - origin, 6),
        "end": round(record.end - origin, 6),
        "status": record.status,
        "error": record.error,
        "detail": record.detail,
        "finish": record.finish,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "asked_tokens": record.asked_tokens,
        "first_answer_ms": round((record.first_answer - record.sent) * 1e3, 3) if record.first_answer else None,
        "chunk_ms": [round((t - record.sent) * 1e3, 3) for t in record.times],
    }
    if any(count != 1 for count in record.tokens):
        line["chunk_tokens"] = [round(count, 3) for count in record.tokens]
    return line


def from_json(line: dict[str, Any]) -> Record:
    """The inverse of `to_json` (with origin 0)."""
    sent = line["sent"]
    chunk_ms = line["chunk_ms"]
    first_answer = line.get("first_answer_ms")
    return Record(
        number=line["number"],
        lane=line["lane"],
        warmup=line["warmup"],
        scheduled=line["scheduled"],
        sent=sent,
        end=line["end"],
        status=line["status"],
        error=line["error"],
        detail=line["detail"],
        finish=line["finish"],
        prompt_tokens=line["prompt_tokens"],
        cached_tokens=line.get("cached_tokens", 0),
        output_tokens=line["output_tokens"],
        asked_tokens=line["asked_tokens"],
        first_answer=0.0 if first_answer is None else sent + first_answer / 1e3,
        times=array("d", (sent + ms / 1e3 for ms in chunk_ms)),
        tokens=array("d", line.get("chunk_tokens") or [1.0] * len(chunk_ms)),
    )


def append(path: Path, records: Iterable[Record], level: int, origin: float) -> None:
    with path.open("ab") as file:
        for record in records:
            file.write(orjson.dumps(to_json(record, level, origin)) + b"\n")


def read(path: Path) -> Iterator[tuple[int, Record]]:
    """(level, record) of every line. Raises UserError naming the line that is no record."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                raw = orjson.loads(line)
                yield raw["level"], from_json(raw)
            except (orjson.JSONDecodeError, KeyError, TypeError) as error:
                raise UserError(f"{path}:{number} is not a request record: {error}") from error
