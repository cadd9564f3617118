"""Which request fields each engine really obeys. Kept apart from the engines so that the HTTP process, which refuses
the others by name, need not import them. test_fields.py in tests/unit/engines and tests/unit/vllm has a case for every
field listed here, what the library below is given for it, and shows that every other one is refused.
"""

from __future__ import annotations

_COMMON = frozenset(
    {
        "frequency_penalty",
        "ignore_eos",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "model",
        "n",
        "presence_penalty",
        "prompt",
        "seed",
        "stop",
        "stream",
        "stream_options",
        "temperature",
        "top_p",
        "user",
        "service_tier",
    }
)
_SAMPLING = frozenset({"top_k", "min_p", "repetition_penalty", "logit_bias", "logprobs", "top_logprobs"})
_CHAT = frozenset({"tools", "tool_choice", "response_format", "chat_template_kwargs", "reasoning_effort"})

HONOURED: dict[str, frozenset[str]] = {
    "llamacpp": _COMMON | _SAMPLING | _CHAT | {"parallel_tool_calls"},
    "vllm": _COMMON | _SAMPLING | _CHAT | {"parallel_tool_calls", "echo", "min_tokens", "stop_token_ids"},
    # The simulated engine draws no samples: the sampling fields change nothing there, by its nature.
    "simulated": _COMMON | _SAMPLING - {"logprobs", "top_logprobs"},
}
