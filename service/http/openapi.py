"""The OpenAPI document, made from the same models that check requests; every status that can come is in it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import models_json_schema

from service.http.answers import (
    ChatAnswer,
    ChatChunk,
    ErrorEnvelope,
    Health,
    ModelBody,
    ModelsBody,
    NotReadyEnvelope,
    Profile,
    Prompt,
    Ready,
    TextAnswer,
    Tokens,
    Version,
)
from service.http.dialects.chat_body import ChatBody
from service.http.dialects.messages.answers import MessageAnswer, MessageError, MessageEvent, TokensCounted
from service.http.dialects.messages.schema import CountTokensRequest, MessagesRequest
from service.http.dialects.responses.answers import ResponseAnswer, ResponseEvent
from service.http.dialects.responses.schema import ResponsesRequest
from service.http.schema import (
    MOST_LABEL,
    SESSION,
    CompletionRequest,
    DetokenizeRequest,
    ProfileRequest,
    TokenizeRequest,
)
from service.http.settings import HttpSettings
from service.metrics.live import LiveFigures

Json = dict[str, Any]

_REFERENCE = "#/components/schemas/{model}"

LEAST_DEADLINE_S = 0.1
"""Smallest x-request-timeout, seconds: below it no request could be served."""

_ERRORS = {
    "400": "The request is wrong: `param` names the field, `message` says why.",
    "401": "No valid API key.",
    "403": "The API key may not use this tier, or is no operator's.",
    "404": "No such model or endpoint.",
    "405": "Not this method.",
    "413": "The body is larger than the limit.",
    "429": "Slots busy and queue full, or the key's own limit; Retry-After says when to come back.",
    "500": "The engine or the service failed.",
    "503": "Nothing can serve yet, or any more; Retry-After where it is known.",
    "504": "A deadline passed before the first byte.",
}

_MODELS: tuple[type[BaseModel], ...] = (
    ChatBody,
    CompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
    ProfileRequest,
    ChatAnswer,
    ChatChunk,
    TextAnswer,
    ModelsBody,
    ModelBody,
    Tokens,
    Prompt,
    Profile,
    Health,
    Ready,
    NotReadyEnvelope,
    Version,
    ErrorEnvelope,
    ResponsesRequest,
    ResponseAnswer,
    ResponseEvent,
    CountTokensRequest,
    MessagesRequest,
    MessageAnswer,
    MessageEvent,
    MessageError,
    TokensCounted,
)


def openapi_document(settings: HttpSettings, version: str) -> Json:
    """OpenAPI 3.1. Ranges that settings narrow are shown as narrowed."""
    _, schemas = models_json_schema([(model, "validation") for model in _MODELS], ref_template=_REFERENCE)
    definitions: Json = schemas["$defs"]
    live: Json = TypeAdapter(LiveFigures).json_schema(ref_template=_REFERENCE, mode="serialization")
    definitions |= {**live.pop("$defs"), "LiveFigures": live}
    for name in ("ChatBody", "CompletionRequest"):
        _narrow(definitions[name]["properties"]["n"], settings.max_n)
    _narrow(definitions["ChatBody"]["properties"]["top_logprobs"], settings.max_logprobs)
    _narrow(definitions["CompletionRequest"]["properties"]["logprobs"], settings.max_logprobs)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "glm5-serve",
            "version": version,
            "description": "GGUF models behind OpenAI's and Anthropic's HTTP interfaces. Unknown fields, and "
            "fields that the engine cannot honour, are refused by name.",
        },
        "security": [{}, {"key": []}],
        "paths": _paths(),
        "components": {"schemas": definitions, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _paths() -> Json:
    all_errors = tuple(_ERRORS)
    plain = ("405", "500")
    keyed = ("401", *plain)
    owned = ("401", "403", *plain)
    body = ("400", "401", "404", "405", "413", "500", "503", "504")
    model = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    chat = _generation("Answer a conversation", "ChatBody", "ChatAnswer", "ChatChunk", all_errors)
    text = _generation("Continue a text", "CompletionRequest", "TextAnswer", "TextAnswer", all_errors)
    responses = _generation("Answer items", "ResponsesRequest", "ResponseAnswer", "ResponseEvent", all_errors)
    stream = responses["responses"]["200"]["content"]["text/event-stream"]
    stream["schema"] = _named_event("ResponseEvent", "ErrorEnvelope")
    messages = _generation("Answer a conversation", "MessagesRequest", "MessageAnswer", "MessageEvent", all_errors)
    count = _operation("Count the prompt's tokens", "TokensCounted", body, "CountTokensRequest")
    ready = _operation("Whether the service can serve", "Ready", plain)
    ready["responses"]["503"] = _response("Not yet: the phase, and when it will.", "NotReadyEnvelope")
    metrics = _operation("Prometheus metrics", "Health", owned)
    metrics["responses"]["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    live = _operation("The service as it runs, an event a second", "LiveFigures", ("429", *owned))
    live["responses"]["200"]["content"] = {"text/event-stream": {"schema": _event("LiveFigures", last=False)}}
    tokenize = _operation("Tokens of a prompt or a conversation", "Tokens", body, "TokenizeRequest")
    return {
        "/v1/chat/completions": {"post": chat},
        "/v1/completions": {"post": text},
        "/v1/responses": {"post": responses},
        "/v1/messages": {"post": _anthropic(messages)},
        "/v1/messages/count_tokens": {"post": _anthropic(count)},
        "/v1/models": {"get": _operation("The models that can be asked for", "ModelsBody", keyed)},
        "/v1/models/{model}": {
            "get": _operation("One model", "ModelBody", ("404", *keyed)) | {"parameters": [model]},
        },
        "/tokenize": {"post": tokenize},
        "/detokenize": {"post": _operation("Text of tokens", "Prompt", body, "DetokenizeRequest")},
        "/profile": {
            "post": _operation("What decode steps spend their time on", "Profile", ("403", *body), "ProfileRequest")
        },
        "/v1/service/live": {"get": live},
        "/health": {"get": _operation("Whether the process lives", "Health", plain)},
        "/ready": {"get": ready},
        "/version": {"get": _operation("The service's version", "Version", plain)},
        "/metrics": {"get": metrics},
    }


def _generation(summary: str, request: str, whole: str, chunk: str, errors: tuple[str, ...]) -> Json:
    operation = _operation(summary, whole, errors, request)
    operation["parameters"] = [
        {
            "name": "x-glm-mode",
            "in": "header",
            "description": "Which pool to prefer.",
            "schema": {"type": "string", "enum": ["latency", "throughput"]},
        },
        {
            "name": "x-request-timeout",
            "in": "header",
            "description": "The client's own deadline, seconds; it can shorten the service's, not lengthen it.",
            "schema": {"type": "number", "minimum": LEAST_DEADLINE_S},
        },
        {
            "name": "x-session-id",
            "in": "header",
            "description": f"{SESSION} The body's prompt_cache_key goes before it.",
            "schema": {"type": "string", "maxLength": MOST_LABEL},
        },
    ]
    answer = operation["responses"]["200"]
    answer["content"]["text/event-stream"] = {"schema": _event(chunk)}
    answer["headers"] = {
        "x-glm-pool": {"description": "The pool that served it.", "schema": {"type": "string"}},
        "x-glm-ignored": {
            "description": "Names in the body that were taken and change nothing.",
            "schema": {"type": "string"},
        },
        "x-glm-queue-ms": {"description": "Time in the queue, ms.", "schema": {"type": "string"}},
    }
    return operation


def _anthropic(operation: Json) -> Json:
    """The same with Anthropic's envelope for errors."""
    for status, response in operation["responses"].items():
        if status != "200":
            response["content"]["application/json"]["schema"] = {"$ref": _REFERENCE.format(model="MessageError")}
    if "text/event-stream" in (content := operation["responses"]["200"]["content"]):
        content["text/event-stream"]["schema"] = _named_event("MessageEvent", "MessageError")
    return operation


def _named_event(*models: str) -> Json:
    """One server-sent event whose name is the `type` of its data."""
    kinds = [{"$ref": _REFERENCE.format(model=model)} for model in models]
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": kinds}}
    return {
        "type": "object",
        "required": ["event", "data"],
        "properties": {"event": {"type": "string"}, "data": data},
    }


def _event(chunk: str, *, last: bool = True) -> Json:
    """One server-sent event: a chunk, an error at a bad end, and at a good one (`last`) the text `[DONE]`."""
    kinds = [{"$ref": _REFERENCE.format(model=chunk)}, {"$ref": _REFERENCE.format(model="ErrorEnvelope")}]
    chunks = {"contentMediaType": "application/json", "contentSchema": {"anyOf": kinds}}
    data = {"type": "string", "anyOf": [{"const": "[DONE]"}, chunks] if last else [chunks]}
    return {
        "type": "object",
        "required": ["data"],
        "properties": {"event": {"enum": ["message", "error"]}, "data": data},
    }


def _operation(summary: str, answer: str, errors: tuple[str, ...], request: str | None = None) -> Json:
    responses = {"200": _response("Success", answer)}
    for status in sorted(errors):
        responses[status] = _response(_ERRORS[status], "ErrorEnvelope")
    operation: Json = {"summary": summary, "responses": responses}
    if request is not None:
        schema = {"$ref": _REFERENCE.format(model=request)}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


def _response(description: str, model: str) -> Json:
    schema = {"$ref": _REFERENCE.format(model=model)}
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _narrow(schema: Json, maximum: int) -> None:
    for branch in schema["anyOf"]:
        if branch.get("type") == "integer":
            branch["maximum"] = min(maximum, branch["maximum"])
