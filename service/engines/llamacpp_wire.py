"""Between our requests and pieces of an answer and llama.cpp's dialect of OpenAI's JSON. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson

from service.engines.choice import NOTHING, Choice
from service.engines.llamacpp_grammar import grammar, wanted_schema
from service.errors import BadRequest, ContextOverflow, EngineFailed, ServiceError
from service.types import Delta


def request_body(asked: dict[str, Any], context_tokens: int) -> bytes:
    """llama.cpp's body for OpenAI's `asked`: a stream, with counts on every chunk."""
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
    body.pop("stop", None)  # llamacpp_stops.py looks for them
    if body.get("logprobs") is not None and body["logprobs"] is not False:
        # Asked for no alternatives llama.cpp gives no log-probabilities, and 20 where nothing is said of them.
        name = "top_logprobs" if body["logprobs"] is True else "logprobs"
        body[name] = max(1, body.get(name) or 0)
    if body.get("seed") is not None:
        body["seed"] = folded(body["seed"])
    schema = wanted_schema(body)
    if schema is not None:
        del body["response_format"]
        body["grammar"] = grammar(schema)
        # Without tools to call the answer is JSON from its first character on, so there is nothing to tell apart.
        for unused in ("tools", "tool_choice", "parallel_tool_calls"):
            body.pop(unused, None)
        body["reasoning_format"] = "none"
        body["chat_template_kwargs"] = {**(body.get("chat_template_kwargs") or {}), "enable_thinking": False}
    # OpenAI's defaults, not llama.cpp's (0.8, 40, 0.95, 0.05).
    for key, value in (("temperature", 1.0), ("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        if body.get(key) is None:
            body[key] = value
    if body["top_k"] == -1:  # vLLM's spelling of "off"
        body["top_k"] = 0
    return orjson.dumps(body)


def folded(seed: int) -> int:
    """A seed of 64 bits in llama.cpp's 32, of which the highest means a random one. Small ones stay themselves."""
    seed %= 1 << 64
    high, low = divmod(seed, 1 << 32)
    if high:
        low ^= (high * 0x9E3779B1) % (1 << 32)
    return low if low != 0xFFFFFFFF else 0x7FFFFFFF


def alternatives(body: dict[str, Any]) -> int:
    """How many were asked for beside each chosen token."""
    asked = body.get("logprobs")
    return int(body.get("top_logprobs") or 0) if asked is True else int(asked or 0)


def error_from(error: dict[str, Any], prompt_field: str = "messages") -> ServiceError:
    """llama.cpp's error object as one of ours. `prompt_field`: of the request, what its prompt is made of."""
    message = str(error.get("message", "unknown error"))
    if error.get("type") == "exceed_context_size_error":
        prompt, context = error.get("n_prompt_tokens"), error.get("n_ctx")
        return ContextOverflow(
            f"the prompt has {prompt} tokens but the context of this service is {context} tokens; shorten the prompt",
            param=prompt_field,
        )
    if int(error.get("code", 500)) < 500:
        return BadRequest(message)
    return EngineFailed(f"llama.cpp: {message}")


class Meter:
    """Reads one request's chunks in order: turns llama.cpp's counters, which stand in its extras, into differences."""

    def __init__(self, alternatives: int = 0) -> None:
        """`alternatives`: how many of them each token's log-probability is to have."""
        self._choice, self._alternatives = Choice(), alternatives
        self._output = self._prompt = self._drafted = self._accepted = 0

    @property
    def finished(self) -> bool:
        return self._choice.finished

    def read(self, message: dict[str, Any]) -> Delta | None:
        """None for a chunk that says nothing of the answer: the prompt's progress, the role."""
        if message.get("prompt_progress") is not None:
            return None
        timings, usage = message.get("timings") or {}, message.get("usage") or {}
        cached = int(timings.get("cache_n", 0))
        prompt = 0 if self._prompt else int(usage.get("prompt_tokens", cached + int(timings.get("prompt_n", 0))))
        output = int(usage.get("completion_tokens", timings.get("predicted_n", self._output)))
        drafted = max(self._drafted, int(timings.get("draft_n", 0)))
        accepted = max(self._accepted, int(timings.get("draft_n_accepted", 0)))
        counts = Delta(
            output_tokens=output - self._output,
            prompt_tokens=prompt,
            cached_tokens=cached if prompt else 0,
            drafted=drafted - self._drafted,
            accepted=accepted - self._accepted,
        )
        self._output, self._drafted, self._accepted = output, drafted, accepted
        self._prompt = self._prompt or prompt
        choices = message.get("choices")
        delta = self._choice.read(choices[0], counts) if choices else counts
        if delta.logprobs:
            kept = (replace(token, top=token.top[: self._alternatives]) for token in delta.logprobs)
            delta = replace(delta, logprobs=tuple(kept))
        return None if delta == NOTHING else delta


def counter(text: str, name: str) -> int:
    """One counter without labels out of a Prometheus text; 0 where it is not there."""
    for line in text.splitlines():
        if line.startswith(f"{name} "):
            return int(float(line.split(" ")[1]))
    return 0
