"""The `http:` part of a profile."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class HttpSettings(BaseModel):
    """Limits and deadlines of the HTTP face."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = Field("127.0.0.1", description="Address to listen on. 0.0.0.0 exposes the service to the network.")
    port: int = Field(8000, ge=0, le=65535, description="TCP port to listen on; 0 takes a free one.")
    max_connections: int = Field(
        4096,
        ge=1,
        le=1_000_000,
        description="Connections that one ingress process holds at most; a further one gets 503.",
    )
    max_header_bytes: int = Field(
        64 * 1024,
        ge=4096,
        le=1 << 20,
        description="Largest head of a request (request line and headers), bytes; beyond it 431.",
    )
    header_timeout_s: float = Field(
        10.0, gt=0, le=3600, description="Longest time for the head of a request to arrive, seconds; beyond it 408."
    )
    keep_connection_s: float = Field(
        75.0, gt=0, le=86_400, description="Longest that a connection is kept between two requests, seconds."
    )
    max_body_bytes: int = Field(
        8 * 1024 * 1024, ge=1024, le=1 << 30, description="Largest request body, bytes; beyond it 413."
    )
    max_json_depth: int = Field(
        64, ge=8, le=256, description="Deepest nesting of arrays and objects in a request body, levels; beyond it 400."
    )
    body_timeout_s: float = Field(
        30.0, gt=0, le=3600, description="Longest time for a request body to arrive, seconds; beyond it 400."
    )
    request_timeout_s: float = Field(
        600.0,
        gt=0,
        le=86_400,
        description="Deadline of a whole request from arrival to last byte, queueing included, seconds; beyond it 504, "
        "or an error event in a stream. A client may ask for less with the header x-request-timeout, not for more.",
    )
    first_byte_timeout_s: float = Field(
        120.0,
        gt=0,
        le=86_400,
        description="Longest wait of an admitted streaming request for its first chunk, seconds; beyond it 504. "
        "Must cover the longest prompt's prefill.",
    )
    idle_timeout_s: float = Field(
        60.0,
        gt=0,
        le=86_400,
        description="Longest silence between two chunks of a running stream, seconds; beyond it an error event.",
    )
    keepalive_s: float = Field(
        10.0,
        gt=0,
        le=3600,
        description="Interval of SSE comments while a stream that has sent its headers has nothing to say, seconds.",
    )
    open_stream_after_s: float = Field(
        20.0,
        gt=0,
        le=86_400,
        description="A streaming request still without a chunk after this time gets its 200 and keep-alive comments, "
        "so that proxies do not cut it, seconds. A later error is then an event in the stream, not a status.",
    )
    max_n: int = Field(8, ge=1, le=128, description="Largest `n`, choices per prompt; beyond it 400.")
    max_prompts: int = Field(
        32, ge=1, le=2048, description="Largest number of prompts in one /v1/completions request; beyond it 400."
    )
    max_logprobs: int = Field(
        20,
        ge=0,
        le=20,
        description="Largest `top_logprobs` (chat) or `logprobs` (completions), alternatives per token.",
    )
    page: bool = Field(
        True,
        description="Serve the browser page at / (chat, live figures, a short load test).",
    )
    open_metrics: bool = Field(
        False,
        description="GET /metrics needs no key even where admission.anonymous is false: for a Prometheus that can send "
        "none, on a network that callers do not reach.",
    )
    tokenize_at_once: int = Field(
        4, ge=1, le=1024, description="Calls of /tokenize and /detokenize that one ingress works on at once."
    )
    tokenize_bytes: int = Field(
        8 * 1024 * 1024, ge=1024, le=1 << 32, description="Bytes of all bodies that these work on at once."
    )
    tokenize_timeout_s: float = Field(
        15.0, gt=0, le=3600, description="Deadline of such a call, waiting included, seconds; beyond it 504."
    )
    cors_origins: tuple[str, ...] = Field(
        (), description="Browser origins allowed to call the service; empty switches CORS off, '*' allows all."
    )
