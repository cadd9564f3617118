"""From a validated request to the engine requests it takes. Pure: no clock, no I/O; refuses what cannot be honoured."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from pydantic import BaseModel

from service.errors import BadRequest
from service.http.backend import Mode, RequestContext, RequestedTier
from service.http.honour import OURS, harmless, honoured, refuse_unhonoured, unheeded
from service.http.names import find_model
from service.http.schema import ChatRequest, CompletionRequest, Message, NamedTool
from service.http.schemas import fit_schemas
from service.http.settings import HttpSettings
from service.http.validate import nearest
from service.types import Endpoint, EngineRequest, ModelCard, Tier

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Headers:
    """What a request's headers ask for. `deadline_s` in seconds, None where the client set none.
    `session`: of x-session-id, empty where there is none."""

    credential: str | None = field(default=None, repr=False)
    mode: Mode | None = None
    deadline_s: float | None = None
    session: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """One engine request. `index`: of its choice in the answer. `prompt`: which prompt it answers."""

    request: EngineRequest
    index: int
    prompt: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One HTTP request: its parts and what the answer says about itself. `must_call`: tool_choice demands a tool call.
    `timeout_s`: for the whole of it. `ignored`: names in the client's body that change nothing; it is told them.
    `client`: the client's own body, where the dialect's answer repeats parts of it."""

    id: str
    endpoint: Endpoint
    model: str
    stream: bool
    include_usage: bool
    must_call: bool
    timeout_s: float
    parts: tuple[Part, ...]
    context: RequestContext
    ignored: tuple[str, ...] = ()
    client: Body = field(default_factory=dict, repr=False)
    show_reasoning: bool = True


def make_plan(
    request: ChatRequest | CompletionRequest,
    raw: Body,
    *,
    id: str,
    headers: Headers,
    settings: HttpSettings,
    cards: list[ModelCard],
    honours: frozenset[str],
    ignored: tuple[str, ...] = (),
    soft: frozenset[str] = frozenset(),
    client: Body | None = None,
    show_reasoning: bool = True,
    aliases: Sequence[str] = (),
) -> Plan:
    """`raw` is the body that `request` was made from. Raises BadRequest and ModelNotFound, naming the field. `ignored`,
    `soft`, `client` and `show_reasoning` as a dialect's reading has them. `aliases`: see `find_model`.

    With no cards and no honours known yet (nothing has loaded) only what needs neither is checked.
    """
    card = find_model(request.model, cards, aliases) if cards else None
    most = _max_tokens(request)
    if card is not None and most is not None and most > card.context_tokens and "max_tokens" in soft:
        fits = {"max_tokens": card.context_tokens}
        request, raw, ignored = request.model_copy(update=fits), raw | fits, (*ignored, "max_tokens")
    _check(request, settings, card)
    given_up = unheeded(raw, honours, soft)
    raw = {name: value for name, value in raw.items() if name not in given_up}
    refuse_unhonoured(raw, honours)
    body = _engine_body(fit_schemas(raw, None if card is None else card.engine), honours)
    tier = request.service_tier
    wanted: RequestedTier | None = "priority" if tier == "fast" else tier
    timeout_s = min(settings.request_timeout_s, headers.deadline_s or settings.request_timeout_s)
    stream = bool(request.stream)
    endpoint: Endpoint = "chat" if isinstance(request, ChatRequest) else "completions"
    bodies = list(_fan_out(body, request))
    n = request.n or 1
    parts = tuple(
        Part(
            request=EngineRequest(
                id=id if len(bodies) == 1 else f"{id}-{index}",
                endpoint=endpoint,
                body=orjson.dumps(each),
                tier=_tier(wanted),
                timeout_s=timeout_s,
            ),
            index=index,
            prompt=index // n,
        )
        for index, each in enumerate(bodies)
    )
    context = RequestContext(
        credential=headers.credential,
        requested_tier=wanted,
        mode=headers.mode,
        deadline_s=headers.deadline_s,
        prompt_bytes=len(orjson.dumps(bodies[0].get("messages") or bodies[0].get("prompt"))),
        max_tokens=_max_tokens(request),
        siblings=len(parts),
        stream=stream,
        session=_session(request.prompt_cache_key or headers.session or request.user, bodies[0].get("messages") or []),
    )
    usage = bool(request.stream_options and request.stream_options.include_usage)
    ignored = tuple(dict.fromkeys((*ignored, *given_up)))
    return Plan(
        id,
        endpoint,
        request.model,
        stream,
        usage,
        _must_call(request),
        timeout_s,
        parts,
        context,
        ignored,
        client or {},
        show_reasoning,
    )


def _session(label: str | None, messages: list[Body]) -> str:
    """Of the client's own `label`, else of the messages up to the first user's. Later turns repeat either, and so find
    the KV of the earlier ones."""
    if label:
        return _hashed(label.encode())
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        return ""
    return _hashed(orjson.dumps(messages[: first + 1]))


def _hashed(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _must_call(request: ChatRequest | CompletionRequest) -> bool:
    choice = request.tool_choice if isinstance(request, ChatRequest) else None
    return choice == "required" or isinstance(choice, NamedTool)


def _tier(wanted: RequestedTier | None) -> Tier:
    return "default" if wanted is None or wanted == "auto" else wanted


def _max_tokens(request: ChatRequest | CompletionRequest) -> int | None:
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        return request.max_completion_tokens
    return request.max_tokens


# What needs more than one field, the settings or the model.


def _check(request: ChatRequest | CompletionRequest, settings: HttpSettings, card: ModelCard | None) -> None:
    if request.stream_options is not None and not request.stream:
        raise BadRequest("stream_options is only allowed with stream=true", param="stream_options")
    if (request.n or 1) > settings.max_n:
        raise BadRequest(f"n may be at most {settings.max_n} here, not {request.n}", param="n")
    if isinstance(request, ChatRequest):
        _check_chat(request, settings)
    else:
        _check_completion(request, settings, card)
    most = _max_tokens(request)
    if most is not None and request.min_tokens is not None and request.min_tokens > most:
        raise BadRequest(f"min_tokens ({request.min_tokens}) is larger than max_tokens ({most})", param="min_tokens")
    if card is None:
        return
    if most is not None and most > card.context_tokens:
        raise BadRequest(
            f"max_tokens is too large: {most}; this model's context has {card.context_tokens} tokens",
            param="max_tokens",
        )
    _check_ids((int(key) for key in request.logit_bias or ()), card, "logit_bias")
    _check_ids(request.stop_token_ids or (), card, "stop_token_ids")


def _check_chat(request: ChatRequest, settings: HttpSettings) -> None:
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise BadRequest(f"max_tokens ({old}) and max_completion_tokens ({new}) disagree", param="max_tokens")
    if request.top_logprobs is not None:
        if request.top_logprobs and not request.logprobs:
            raise BadRequest("top_logprobs is only allowed with logprobs=true", param="top_logprobs")
        _check_logprobs(request.top_logprobs, settings, "top_logprobs")
    names = [tool.function.name for tool in request.tools or ()]
    if len(set(names)) < len(names):
        raise BadRequest("two tools have the same name", param="tools")
    choice = request.tool_choice
    if not names and (choice == "required" or isinstance(choice, NamedTool)):
        raise BadRequest("tool_choice is only allowed with tools", param="tool_choice")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        near = nearest(choice.function.name, names)
        raise BadRequest(f"tool_choice names no tool of this request{near}", param="tool_choice")


def _check_completion(request: CompletionRequest, settings: HttpSettings, card: ModelCard | None) -> None:
    if request.logprobs is not None:
        _check_logprobs(request.logprobs, settings, "logprobs")
    if request.best_of is not None and request.best_of < (request.n or 1):
        raise BadRequest(f"best_of ({request.best_of}) is smaller than n ({request.n})", param="best_of")
    prompts = _prompts(request)
    if len(prompts) > settings.max_prompts:
        raise BadRequest(
            f"prompt may hold at most {settings.max_prompts} prompts here, not {len(prompts)}", param="prompt"
        )
    if card is not None:
        for prompt in prompts:
            if isinstance(prompt, list):
                _check_ids(prompt, card, "prompt")


def _check_logprobs(asked: int, settings: HttpSettings, param: str) -> None:
    if asked > settings.max_logprobs:
        raise BadRequest(f"{param} may be at most {settings.max_logprobs} here, not {asked}", param=param)


def _check_ids(ids: Iterable[int], card: ModelCard, param: str) -> None:
    largest = max(ids, default=0)
    if largest >= card.vocab_size:
        raise BadRequest(
            f"{param}: the token id {largest} is not in this model's vocabulary of {card.vocab_size}", param=param
        )


# What the engine gets.


def _engine_body(raw: Body, honours: frozenset[str]) -> Body:
    """`raw` without what is ours, null, or harmless and unknown to the engine."""
    body = {
        name: value
        for name, value in raw.items()
        if value is not None and name not in OURS and (honoured(name, honours) or not harmless(name, raw))
    }
    if not raw.get("tools"):
        for name in ("tools", "tool_choice", "parallel_tool_calls"):
            body.pop(name, None)
    most = body.pop("max_completion_tokens", None)
    if most is not None:
        body["max_tokens"] = most
    body["model"] = raw["model"]
    return body


def _fan_out(body: Body, request: ChatRequest | CompletionRequest) -> Iterable[Body]:
    """One body per choice, prompts first; the seeds of one prompt's choices differ by one."""
    raw_prompts: list[Body]
    if isinstance(request, ChatRequest):
        raw_prompts = [{"messages": engine_messages(request.messages)}]
    else:
        raw_prompts = [{"prompt": prompt} for prompt in _prompts(request)]
    for prompt in raw_prompts:
        for i in range(request.n or 1):
            seed = {} if request.seed is None else {"seed": _wrap(request.seed + i)}
            yield body | prompt | seed


def _wrap(seed: int) -> int:
    return seed if seed < 2**63 else seed - 2**64


def _prompts(request: CompletionRequest) -> list[str | list[int]]:
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]  # type: ignore[list-item]
    return prompt  # type: ignore[return-value]


def prompt_of(request: ChatRequest | CompletionRequest, raw: Body) -> Body:
    """What makes the prompt of a chat, as `Engine.tokenize` takes it."""
    assert isinstance(request, ChatRequest)
    body: Body = {"messages": engine_messages(request.messages), "add_generation_prompt": True}
    if request.tool_choice != "none" and request.tools:
        body["tools"] = raw["tools"]
    if request.chat_template_kwargs:
        body["chat_template_kwargs"] = raw["chat_template_kwargs"]
    return body


def engine_messages(messages: Iterable[Message]) -> list[Body]:
    """Messages as chat templates know them: `developer` is `system`, refusals are text, no answer-only keys."""
    return [_message(_declared(message)) for message in messages]


def _declared(value: Any) -> Any:
    """Models as JSON, without what is null and without keys that loose models took."""
    if isinstance(value, BaseModel):
        fields = ((name, getattr(value, name)) for name in type(value).model_fields)
        return {name: _declared(inside) for name, inside in fields if inside is not None}
    return [_declared(inside) for inside in value] if isinstance(value, list) else value


def _message(message: Body) -> Body:
    if message["role"] == "developer":
        message["role"] = "system"
    if message["role"] == "assistant":
        _echoed(message)
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = [{"type": "text", "text": p.get("text", p.get("refusal"))} for p in content]
    return message


def _echoed(message: Body) -> None:
    """An answer that comes back: one name for reasoning, a refusal as text, arguments that are JSON."""
    refusal, reasoning = message.pop("refusal", None), message.pop("reasoning", None)
    if reasoning and not message.get("reasoning_content"):
        message["reasoning_content"] = reasoning
    for empty in ("tool_calls", "reasoning_content"):
        if not message.get(empty):
            message.pop(empty, None)
    if not message.get("content"):
        # Templates tell nothing said from an empty text.
        said_nothing = None if "tool_calls" in message else ""
        message["content"] = refusal or (message.get("content") if message.get("content") == "" else said_nothing)
    for call in message.get("tool_calls") or ():
        call["function"]["arguments"] = call["function"]["arguments"].strip() or "{}"
