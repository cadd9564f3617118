"""The running service: the same answers as the engine alone, many streams, clients that hang up, sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import xllamacpp

from service.config import ModelConfig
from tests.e2e.traffic import events
from tests.service import GLM5, Service

pytestmark = pytest.mark.e2e


def ask(model: str, content: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": content}], **more}


async def read_stream(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Text and usage of one streamed answer."""
    text, usage = "", {}
    async for event in events(client, body):
        usage = event.get("usage") or usage
        text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    return text, usage


@pytest.mark.parametrize("content", ["What is the capital of France? Answer in one word.", "Count from 1 to 20."])
def test_greedy_equals_the_engine_alone(service: Service, model: str, content: str) -> None:
    params = xllamacpp.CommonParams()
    params.model.path = str(ModelConfig().file())
    params.n_ctx, params.verbosity = 2048, 0
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 40}
    answers: list[dict[str, Any]] = []
    xllamacpp.Server(params).handle_chat_completions(json.dumps(body).encode(), lambda c: answers.append(json.loads(c)))
    with service.client as client:
        ours = client.post("/v1/chat/completions", json={"model": model, **body}).json()
    assert ours["choices"][0]["message"]["content"] == answers[0]["choices"][0]["message"]["content"]
    assert ours["usage"]["completion_tokens"] == answers[0]["usage"]["completion_tokens"]
    assert ours["choices"][0]["finish_reason"] == answers[0]["choices"][0]["finish_reason"]


async def test_64_streams_lose_nothing(service: Service, model: str) -> None:
    await asyncio.sleep(2.5)  # llama.cpp's own text is fetched about once a second
    before = service.metric("glm_output_tokens_total")
    engine_before = service.metric("llamacpp:tokens_predicted_total")
    async with httpx.AsyncClient(
        base_url=service.url, timeout=180.0, limits=httpx.Limits(max_connections=64)
    ) as client:
        bodies = [
            ask(model, f"Story number {i}.", max_tokens=16, stream=True, stream_options={"include_usage": True})
            for i in range(64)
        ]
        answers = await asyncio.gather(*(read_stream(client, body) for body in bodies))
    told = sum(usage["completion_tokens"] for _, usage in answers)
    assert 64 < told <= 64 * 16
    await asyncio.sleep(2.5)
    assert service.metric("glm_output_tokens_total") - before == told
    assert service.metric("llamacpp:tokens_predicted_total") - engine_before == told


def running_now(service: Service) -> float:
    return service.metric("glm_requests_running")


def wait_until(condition: Any, within_s: float, what: str) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < within_s, f"not within {within_s} s: {what}"
        time.sleep(0.02)
    return time.monotonic() - began


def hang_up_after_send(service: Service, body: dict[str, Any]) -> socket.socket:
    host, port = service.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    raw = socket.create_connection((host, int(port)), timeout=10)
    head = [
        "POST /v1/chat/completions HTTP/1.1",
        "host: x",
        "content-type: application/json",
        f"content-length: {len(data)}",
    ]
    raw.sendall("\r\n".join([*head, "", ""]).encode() + data)
    return raw


@pytest.mark.parametrize("stream", [True, False])
def test_hanging_up_frees_the_slot(service: Service, model: str, stream: bool) -> None:
    wait_until(lambda: running_now(service) == 0, 20, "idle before")
    before = service.metric("glm_output_tokens_total")
    raw = hang_up_after_send(service, ask(model, "Tell a very long story.", max_tokens=1800, stream=stream))
    wait_until(lambda: running_now(service) == 1, 20, "the request runs")
    raw.close()
    wait_until(lambda: running_now(service) == 0, 60, "the slot is free after the client hung up")
    assert service.metric("glm_output_tokens_total") - before < 900, "it went on for half of the answer or more"


def test_hanging_up_in_the_queue_leaves_no_trace(service: Service, model: str) -> None:
    wait_until(lambda: running_now(service) == 0, 20, "idle before")
    long = ask(model, "Tell a very long story.", max_tokens=1800, stream=True)
    busy = [hang_up_after_send(service, long) for _ in range(8)]
    wait_until(lambda: running_now(service) == 8, 60, "all slots are busy")
    queued = [hang_up_after_send(service, long) for _ in range(3)]
    wait_until(lambda: service.metric("glm_requests_queued") == 3, 20, "three wait")
    for raw in queued:
        raw.close()
    wait_until(lambda: service.metric("glm_requests_queued") == 0, 5, "the queue is empty again")
    for raw in busy:
        raw.close()
    wait_until(lambda: running_now(service) == 0, 20, "all slots are free")


def test_every_answer_has_a_request_id(service: Service) -> None:
    with service.client as client:
        for path in ("/health", "/v1/models", "/nothing"):
            assert client.get(path).headers["x-request-id"].startswith("req_"), path
            assert client.get(path, headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1", path
        assert client.get("/-/healthz").text == "success", "what KubeRay asks"


def test_everything_listens_on_loopback_only(service: Service) -> None:
    ours = {service.process.pid, *(child.pid for child in psutil.Process(service.process.pid).children(recursive=True))}
    open_to_others = [
        (connection.pid, connection.laddr)
        for connection in psutil.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
        and connection.pid in ours
        and connection.laddr.ip.removeprefix("::ffff:") not in ("127.0.0.1", "::1")
    ]
    assert not open_to_others


def test_ray_asks_for_its_token(service: Service) -> None:
    gcs = next(p for p in service.processes("gcs_server") if "gcs_server" in p.name())
    port = next(c.laddr.port for c in gcs.net_connections("inet") if c.status == psutil.CONN_LISTEN)
    token = Path(gcs.environ()["RAY_AUTH_TOKEN_PATH"]).read_text()
    assert joins(port, token, within_s=90), "the right token must be let in, or this test proves nothing"
    assert not joins(port, "f" * len(token), within_s=20)


def joins(port: int, token: str, within_s: float) -> bool:
    """Whether a stranger on this machine can attach to the cluster with `token`."""
    stranger = (
        "from deployments.loopback import keep_node_address; keep_node_address(); import ray; "
        f"ray.init(address='127.0.0.1:{port}', log_to_driver=False); print('let in')"
    )
    try:
        result = subprocess.run(
            [str(Path(GLM5).with_name("python")), "-c", stranger],
            capture_output=True,
            text=True,
            timeout=within_s,
            env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token},
        )
    except subprocess.TimeoutExpired:
        return False
    return "let in" in result.stdout


def test_chat_command(service: Service) -> None:
    result = subprocess.run(
        [GLM5, "chat", "--url", service.url, "--temperature", "0", "--max-tokens", "12"],
        input="What is the capital of France? Answer in one word.\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout
