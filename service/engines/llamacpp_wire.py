"""Between OpenAI's JSON and llama.cpp's dialect of it. Pure functions and one small meter; no I/O."""

from __future__ import annotations

from typing import Any

import orjson

from service.errors import BadRequest, ContextOverflow, EngineFailed, ServiceError
from service.types import Chunk, Endpoint


def request_body(asked: dict[str, Any], context_tokens: int) -> bytes:
    """llama.cpp's body for OpenAI's `asked`: always a stream (see assemble.py), with counts on every chunk."""
    body = {**asked, "stream": True}
    body["stream_options"] = {"include_usage": True}
    body["timings_per_token"] = True
    # Chunks during the prompt too: they are the heartbeat, and the only moment at which a prefill can be cancelled.
    body["return_progress"] = True
    limit = body.pop("max_completion_tokens", None) or body.get("max_tokens")
    body["max_tokens"] = min(limit or context_tokens, context_tokens)
    if "repetition_penalty" in body:
        body["repeat_penalty"] = body.pop("repetition_penalty")
    effort = body.pop("reasoning_effort", None)
    if effort is not None:
        body["chat_template_kwargs"] = {"reasoning_effort": effort, **(body.get("chat_template_kwargs") or {})}
    for ours in ("model", "user", "service_tier", "metadata", "store", "n"):
        body.pop(ours, None)
    if body.get("stop") is None:
        body.pop("stop", None)
    # OpenAI's defaults, not llama.cpp's (0.8, 40, 0.95, 0.05).
    for key, value in (("temperature", 1.0), ("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        if body.get(key) is None:
            body[key] = value
    if body["top_k"] == -1:  # vLLM's spelling of "off"
        body["top_k"] = 0
    return orjson.dumps(body)


def error_from(error: dict[str, Any]) -> ServiceError:
    """llama.cpp's error object as one of ours."""
    message = str(error.get("message", "unknown error"))
    if error.get("type") == "exceed_context_size_error":
        prompt, context = error.get("n_prompt_tokens"), error.get("n_ctx")
        return ContextOverflow(
            f"the prompt has {prompt} tokens but the context of this service is {context} tokens; shorten the prompt",
            param="messages",
        )
    if int(error.get("code", 500)) < 500:
        return BadRequest(message)
    return EngineFailed(f"llama.cpp: {message}")


class Meter:
    """Reads one request's chunks in order: takes llama.cpp's extras out and turns its counters into differences."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._offset = 0
        self.finished = False
        self.output_tokens = self.prompt_tokens = self.cached_tokens = 0
        self._drafted = self._accepted = 0

    def read(self, message: dict[str, Any]) -> Chunk:
        """The chunk for the client. `data` is empty for pure progress reports."""
        timings = message.pop("timings", None) or {}
        if message.pop("prompt_progress", None) is not None:
            return Chunk(b"")
        usage = message.get("usage") or {}
        output = int(usage.get("completion_tokens", timings.get("predicted_n", self.output_tokens)))
        delta, self.output_tokens = output - self.output_tokens, output
        cached = int(timings.get("cache_n", 0))
        prompt = int(usage.get("prompt_tokens", cached + int(timings.get("prompt_n", 0))))
        new_prompt = prompt if not self.prompt_tokens else 0
        self.prompt_tokens = self.prompt_tokens or prompt
        self.cached_tokens = self.cached_tokens or cached
        drafted, accepted = int(timings.get("draft_n", 0)), int(timings.get("draft_n_accepted", 0))
        spec = (max(0, drafted - self._drafted), max(0, accepted - self._accepted))
        self._drafted, self._accepted = max(drafted, self._drafted), max(accepted, self._accepted)
        for choice in message.get("choices", ()):
            if choice.get("finish_reason"):
                self.finished = True
            if self._endpoint == "completions" and choice.get("logprobs"):
                choice["logprobs"], self._offset = legacy_logprobs(choice["logprobs"], self._offset)
        return Chunk(orjson.dumps(message), delta, new_prompt, cached if new_prompt else 0, *spec)


def legacy_logprobs(logprobs: dict[str, Any], offset: int) -> tuple[dict[str, Any], int]:
    """Chat-style token log-probabilities as /v1/completions has them; `offset` counts characters of text before."""
    tokens, values, tops, offsets = [], [], [], []
    for entry in logprobs.get("content") or ():
        tokens.append(entry["token"])
        values.append(entry["logprob"])
        tops.append({top["token"]: top["logprob"] for top in entry.get("top_logprobs", ())})
        offsets.append(offset)
        offset += len(entry["token"])
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}, offset


def counter(text: str, name: str) -> int:
    """One counter without labels out of a Prometheus text; 0 where it is not there."""
    for line in text.splitlines():
        if line.startswith(f"{name} "):
            return int(float(line.split(" ")[1]))
    return 0
