"""The demo model and a second real architecture through `glm5 serve` with engine vllm: HTTP, Ray, replica, gate."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path

import httpx
import pytest

from tests.models import demo, gemma
from tests.service import running
from tests.vllm.test_real_models import PROMPT, STEPS, llamacpp, same_up_to_ties

# Two cores: vLLM's import, its engine process, Ray's own processes.
START_S = 240.0


def serve(path: Path, workplace: Path) -> list[str]:
    """Settings of one small vLLM replica."""
    engine = {"name": "vllm", "cache_dir": str(workplace / "cache"), "cpu_kv_gib": 1}
    settings = {"pools.shared.engine": engine, "pools.shared.slots": 8, "model.context_tokens": 512}
    return ["--model", str(path), *(f"--set={key}={json.dumps(value)}" for key, value in settings.items())]


@pytest.mark.e2e
@pytest.mark.timeout(400)
@pytest.mark.parametrize("model", [demo, gemma])
def test_whole_service_gives_llamacpps_text(model: object, workplace: Path, plugin: None) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed")
    path: Path = model()  # type: ignore[operator]
    theirs = llamacpp(path, PROMPT)
    with running(*serve(path, workplace), within_s=START_S) as service, service.client as client:
        native_metrics_arrive(client)
        body = {"model": service.model, "prompt": PROMPT, "max_tokens": STEPS, "temperature": 0}
        answer = client.post("/v1/completions", json={**body, "logprobs": 2})
        assert answer.status_code == 200, answer.text
        tree = answer.json()
        text = tree["choices"][0]["text"]
        same_up_to_ties(tree["choices"][0], theirs)
        assert tree["usage"]["completion_tokens"] == STEPS
        streamed, counted = stream(client, {**body, "stream": True, "stream_options": {"include_usage": True}})
        assert (streamed, counted) == (text, STEPS)
        refused = client.post("/v1/completions", json={**body, "prompt": "a " * 3000})
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        # A client that leaves frees its slot.
        with client.stream("POST", "/v1/completions", json={**body, "max_tokens": 400, "stream": True}) as leaving:
            next(leaving.iter_lines())
        deadline = time.monotonic() + 10
        while service.metric("glm_requests_running") > 0:
            assert time.monotonic() < deadline
            time.sleep(0.2)


def native_metrics_arrive(client: httpx.Client) -> None:
    """The replica speaks of itself and of vLLM as long as it lives: one that falls silent is taken for gone."""
    deadline = time.monotonic() + 15
    while "\nvllm:" not in client.get("/metrics").text:
        assert time.monotonic() < deadline, "the replica fell silent"
        time.sleep(0.5)


def stream(client: httpx.Client, body: dict[str, object]) -> tuple[str, int]:
    """(text, tokens by the usage chunk) of a streamed completion; it must end with [DONE]."""
    text, tokens, last = "", 0, ""
    with client.stream("POST", "/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: "):
                continue
            last = line[6:]
            if last != "[DONE]":
                tree = json.loads(last)
                text += "".join(choice["text"] for choice in tree["choices"])
                tokens = (tree.get("usage") or {}).get("completion_tokens", tokens)
    assert last == "[DONE]"
    return text, tokens
