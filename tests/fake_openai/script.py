"""What the fake server shall do: one frozen value, JSON at the process border."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

FAULTS = (
    "http_500",  # an error envelope with status 500
    "http_429",  # the same with 429 and Retry-After
    "error_event",  # an error object inside a 200 stream, after half of the tokens, then the end without [DONE]
    "missing_done",  # all tokens and usage, but no [DONE]
    "hang",  # half of the tokens, then silence with the connection open
    "empty",  # 200, role chunk, usage of 0 tokens, [DONE]
    "truncated_json",  # half of the tokens, then a data line cut in the middle, end of body
    "disconnect",  # half of the tokens, then the socket is closed inside the chunked body
    "no_usage",  # all tokens and [DONE] but no usage
)


@dataclass(frozen=True, slots=True)
class Fault:
    """Requests number `first`, `first + every`, ... (counted from 0 in order of arrival) fail in this way."""

    kind: str
    every: int
    first: int = 0

    def __post_init__(self) -> None:
        if self.kind not in FAULTS:
            raise ValueError(f"unknown fault {self.kind!r}: one of {', '.join(FAULTS)}")

    def hits(self, number: int) -> bool:
        return number >= self.first and (number - self.first) % self.every == 0


@dataclass(frozen=True, slots=True)
class Script:
    """Truth of a run. Times in seconds; tokens as the server counts them.

    A request's first token is written `ttft_s` + (its number mod 10) * `ttft_step_s` after its last byte was read, or
    later if `slots` are busy; token n follows `n * itl_s` later, on an absolute schedule, so delays never add up.
    `tokens_per_chunk` puts several tokens in one SSE event (speculative decoding), at the time of the last of them.
    `events_per_write` merges events into one write (a busy proxy); `split` cuts every write in two at a changing place,
    also inside frames.
    """

    model: str = "fake"
    ttft_s: float = 0.0
    ttft_step_s: float = 0.0
    itl_s: float = 0.0
    output_tokens: int = 16  # when the request names no maximum
    tokens_per_chunk: int = 1
    events_per_write: int = 1
    reasoning_tokens: int = 0  # of the output, these come first as `reasoning_content`
    slots: int = 0  # 0: no limit; else requests beyond wait in arrival order
    role_chunk: bool = True  # an immediate chunk without text, as most servers send
    newline: str = "\n"  # or "\r\n"
    comments: bool = False  # ": ping" lines between events
    split: bool = False
    close: bool = False  # answer with Connection: close
    dialect: str = "glm"  # names of the counters: glm, vllm, llamacpp
    counter_scale: float = 1.0  # a lying counter (or another client's traffic)
    counter_delay_s: float = 0.0  # /metrics shows the counts of so long ago
    refuse_fields: tuple[str, ...] = ()  # request fields answered with 400
    faults: tuple[Fault, ...] = ()
    log_writes: bool = True

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> Script:
        raw: dict[str, Any] = json.loads(text)
        raw["faults"] = tuple(Fault(**fault) for fault in raw.get("faults", ()))
        raw["refuse_fields"] = tuple(raw.get("refuse_fields", ()))
        return Script(**raw)
