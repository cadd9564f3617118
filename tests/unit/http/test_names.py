"""Names of models: their own, and aliases that the profile allows."""

from __future__ import annotations

import httpx
import pytest

from service.errors import ModelNotFound
from service.http.names import find_model
from service.types import ModelCard
from tests.unit.http.conftest import ask, serving
from tests.unit.http.echo import EchoBackend
from tests.unit.http.test_app import CHAT, problem

FIRST, SECOND = (ModelCard(name, "echo", "none", context_tokens=64, vocab_size=9) for name in ("glm-5", "claude-own"))


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("glm-5", FIRST),
        ("claude-own", SECOND),  # a model's own name comes before any alias
        ("claude-opus-4-6", FIRST),
        ("gpt-5", FIRST),
    ],
)
def test_own_names_then_aliases(name: str, found: ModelCard) -> None:
    assert find_model(name, [FIRST, SECOND], ("claude-*", "gpt-?")) is found


@pytest.mark.parametrize("name", ["glm-6", "Claude-opus", "gpt-55", "claude", "claude-" + "x" * 256])
def test_other_names_do_not_exist(name: str) -> None:
    with pytest.raises(ModelNotFound):
        find_model(name, [FIRST, SECOND], ("claude-*", "gpt-?"))


def test_without_aliases_only_own_names_exist() -> None:
    with pytest.raises(ModelNotFound, match="did you mean 'glm-5'"):
        find_model("glm-", [FIRST], ())


async def test_the_answer_carries_the_name_that_was_asked() -> None:
    async with (
        serving(EchoBackend(), aliases=("claude-*",)) as server,
        httpx.AsyncClient(base_url=server.url) as http,
    ):
        name = "claude-sonnet-4-5"
        assert (await http.post(CHAT, json=ask("x") | {"model": name})).json()["model"] == name
        body = {"model": name, "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
        assert (await http.post("/v1/messages", json=body)).json()["model"] == name
        assert (await http.get(f"/v1/models/{name}")).json()["id"] == name
        assert (await http.post("/tokenize", json={"model": name, "prompt": "x"})).status_code == 200
        assert [card["id"] for card in (await http.get("/v1/models")).json()["data"]] == ["echo"]
        problem(await http.post(CHAT, json=ask("x") | {"model": "gpt-4"}), 404, "model_not_found", "model")
