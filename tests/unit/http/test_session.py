"""Which requests are one session: the client's own word for it, else the opening of the conversation."""

from __future__ import annotations

from typing import Any

import pytest

from service.http.schema import MOST_LABEL
from tests.unit.http.conftest import ask, calling
from tests.unit.http.echo import EchoBackend
from tests.unit.http.test_app import CHAT, TEXT, problem

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


def said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


async def session(path: str, body: dict[str, Any], header: str | None = None) -> str:
    """What the backend is told of a request that is answered."""
    backend = EchoBackend()
    async with calling(backend) as client:
        response = await client.post(path, json=body, headers={} if header is None else {"x-session-id": header})
    assert response.status_code == 200, response.text
    assert not {"user", "prompt_cache_key", "metadata"} & set(response.headers.get("x-glm-ignored", "").split(", "))
    [(request, context)] = backend.seen
    assert not any(label in request.body for label in (b"label one", b"label two"))
    return context.session


def body(path: str, opening: str = "x", **fields: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        CHAT: ask(opening),
        TEXT: {"model": "echo", "prompt": opening},
        RESPONSES: {"model": "echo", "input": opening},
        MESSAGES: {"model": "echo", "max_tokens": 9, "messages": [said("user", opening)]},
    }[path]
    return made | fields


async def test_turns_of_a_conversation_are_one_session_and_other_conversations_others() -> None:
    first = [said("system", "Be brief."), said("user", "Hello")]
    later = [*first, said("assistant", "Hi"), said("user", "Again")]
    at = [await session(CHAT, {"model": "echo", "messages": messages}) for messages in (first, later)]
    assert at[0] == at[1] != ""
    assert at[0] != await session(CHAT, {"model": "echo", "messages": [first[0], said("user", "Other")]})
    assert await session(CHAT, {"model": "echo", "messages": [first[0]]}) == ""
    assert await session(TEXT, body(TEXT)) == ""


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES, MESSAGES])
async def test_the_clients_own_label_takes_the_place_of_the_opening(path: str) -> None:
    one: dict[str, Any] = {"user": "label one"}
    empty: dict[str, Any] = {"user": "", "prompt_cache_key": ""}
    if path == MESSAGES:
        one, empty = {"metadata": {"user_id": "label one"}}, {"metadata": {"user_id": ""}}
    by_user = await session(path, body(path, **one))
    assert by_user == await session(path, body(path, "other", **one)) != await session(path, body(path))
    by_header = await session(path, body(path, **one), "label two")
    assert by_header == await session(path, body(path, "other"), "label two") != by_user
    assert await session(path, body(path, **empty), "") == await session(path, body(path))
    if path != MESSAGES:
        key = {"prompt_cache_key": "label one key"}
        by_key = await session(path, body(path, **one, **key), "label two")
        assert by_key == await session(path, body(path, "other", **key)) not in (by_user, by_header)


async def test_a_session_is_of_one_length_whatever_its_label() -> None:
    for label in ("a", "ä" * MOST_LABEL):
        found = await session(CHAT, body(CHAT, prompt_cache_key=label))
        assert len(found) == len(await session(CHAT, body(CHAT))) and label not in found


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"prompt_cache_key": "k" * (MOST_LABEL + 1)}, "prompt_cache_key"),
        (TEXT, {"prompt_cache_key": "k" * (MOST_LABEL + 1)}, "prompt_cache_key"),
        (TEXT, {"user": "k" * (MOST_LABEL + 1)}, "user"),
        (RESPONSES, {"prompt_cache_key": 7}, "prompt_cache_key"),
    ],
)
async def test_labels_are_bounded(path: str, fields: dict[str, Any], param: str) -> None:
    async with calling(EchoBackend()) as client:
        problem(await client.post(path, json=body(path, **fields)), 400, "invalid_request", param)


async def test_the_other_ways_to_name_a_session_are_bounded_too() -> None:
    async with calling(EchoBackend()) as client:
        headers = {"x-session-id": "k" * (MOST_LABEL + 1)}
        problem(await client.post(CHAT, json=body(CHAT), headers=headers), 400, "invalid_request", "x-session-id")
        long = {"metadata": {"user_id": "k" * (MOST_LABEL + 1)}}
        response = await client.post(MESSAGES, json=body(MESSAGES, **long))
        assert response.status_code == 400 and "metadata.user_id" in response.json()["error"]["message"]
        # Latin-1 is what HTTP/1.1 has beyond ASCII.
        response = await client.post(CHAT, json=body(CHAT), headers=[(b"x-session-id", b"\xe4\xff")])
        assert response.status_code == 200


async def test_other_keys_of_metadata_are_named() -> None:
    async with calling(EchoBackend()) as client:
        response = await client.post(MESSAGES, json=body(MESSAGES, metadata={"user_id": "u", "trace": "t"}))
        assert response.headers["x-glm-ignored"] == "metadata.trace"
