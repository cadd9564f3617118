"""Two pools, tiers and keys over real HTTP on real Ray; the engines are simulated, everything before them is not."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from service.admission.keys import digest
from tests.chaos.streams import body, client, right, settle, stream
from tests.service import Service, running

pytestmark = pytest.mark.e2e

KEYS = {
    name: f"glm-secret-{name}-0123456789abcdef0123456789"
    for name in ("good", "flexonly", "one", "small", "expired", "never-made")
}


@dataclass(frozen=True)
class Pools:
    service: Service
    logs: list[Path]


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    entries = [
        {"name": "good", "sha256": digest(KEYS["good"]).hex()},
        {"name": "flexonly", "sha256": digest(KEYS["flexonly"]).hex(), "tier": "flex"},
        {"name": "one", "sha256": digest(KEYS["one"]).hex(), "concurrency": 1},
        {"name": "small", "sha256": digest(KEYS["small"]).hex(), "tokens_per_minute": 20},
        {"name": "expired", "sha256": digest(KEYS["expired"]).hex(), "expires": time.time() - 5},
    ]
    path.write_text(yaml.safe_dump(entries))
    settings = (
        f"admission.keys_file={path}",
        "admission.anonymous=false",
        "admission.queue_requests=12",
        "pools.latency.max_replicas=1",
        "pools.throughput.max_replicas=1",
        "pools.throughput.slots=8",
        "ingress.replicas=1",
    )
    began = time.time()
    with running("deployments/profiles/sim-two-pools.yaml", sets=settings) as service:
        deadline = time.monotonic() + 60
        while not both_ready(service):
            assert time.monotonic() < deadline, "ready means that one pool serves; the tests need both"
            time.sleep(0.2)
        sessions = [p for p in Path("/tmp/ray").glob("session_2*") if p.stat().st_mtime >= began - 1]
        yield Pools(service, [service.log, *sessions])


def both_ready(service: Service) -> bool:
    pools = httpx.get(f"{service.url}/ready", timeout=10).json()["pools"]
    return all(pool["ready_replicas"] for pool in pools.values())


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name]}"}


def ask(pools: Pools, headers: dict[str, str], **rest: object) -> httpx.Response:
    with httpx.Client(base_url=pools.service.url, timeout=30) as http:
        return http.post("/v1/chat/completions", json=body(4, stream=False, **rest), headers=headers)


@pytest.mark.parametrize(
    ("tier", "mode", "pool", "served"),
    [
        ("priority", None, "latency", "priority"),
        ("default", None, "throughput", "default"),
        ("flex", None, "throughput", "flex"),
        ("auto", None, "latency", "priority"),
        (None, None, "latency", "priority"),
        ("flex", "latency", "latency", "flex"),
        ("priority", "throughput", "throughput", "priority"),
    ],
)
def test_the_answer_says_where_it_came_from(
    pools: Pools, tier: str | None, mode: str | None, pool: str, served: str
) -> None:
    asked = {} if tier is None else {"service_tier": tier}
    answer = ask(pools, bearer("good") | ({} if mode is None else {"x-glm-mode": mode}), **asked)
    assert answer.status_code == 200, answer.text
    assert answer.json()["service_tier"] == served
    assert answer.headers["x-glm-pool"] == pool
    assert float(answer.headers["x-glm-queue-ms"]) < 1000


def engine_work(pools: Pools) -> float:
    return pools.service.metric("glm_prompt_tokens_total") + pools.service.metric("glm_output_tokens_total")


def quiet_work(pools: Pools) -> float:
    """The engines' counters once they stand still."""
    found = -1.0
    while (now := engine_work(pools)) != found:
        found = now
        time.sleep(0.4)
    return found


async def test_a_bad_key_never_reaches_an_engine_and_is_never_written_down(pools: Pools) -> None:
    before = quiet_work(pools)
    refused = [ask(pools, bearer(name)) for name in ("never-made", "expired")]
    refused += [ask(pools, {}), ask(pools, {"authorization": f"Basic {KEYS['good']}"})]
    assert [r.status_code for r in refused] == [401] * 4
    above = ask(pools, bearer("flexonly"), service_tier="priority")
    assert (above.status_code, above.json()["error"]["code"]) == (403, "tier_not_allowed")
    assert quiet_work(pools) == before, "a refused request was computed"

    assert ask(pools, bearer("small"), max_tokens=30).status_code == 200
    used = quiet_work(pools)
    over = ask(pools, bearer("small"))
    assert (over.status_code, over.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(over.headers["retry-after"]) <= 60
    assert quiet_work(pools) == used

    never = ask(pools, bearer("one"), n=2)
    assert (never.status_code, never.json()["error"]["param"]) == (400, "n"), never.text
    assert "2 answers" in never.text and "may run 1 at once" in never.text and "retry-after" not in never.headers
    assert quiet_work(pools) == used

    async with client(pools.service.url) as http:
        first = asyncio.create_task(stream(http, body(60), bearer("one")))
        await asyncio.sleep(0.5)
        second = await stream(http, body(5), bearer("one"))
        assert (second.status, second.code) == (429, "rate_limit_exceeded")
        assert (await first).whole
        assert (await stream(http, body(5), bearer("one"))).whole

    texts = [r.text + str(r.headers) for r in (*refused, above, over, never)]
    texts.append(httpx.get(f"{pools.service.url}/metrics").text)
    files = [p for log in pools.logs for p in ([log] if log.is_file() else log.rglob("*")) if p.is_file()]
    texts += [p.read_text(errors="replace") for p in files if p.stat().st_size < 50_000_000]
    assert len(files) > 3, "the test must look at real logs"
    for name, key in KEYS.items():
        assert not any(key in text or digest(key).hex() in text for text in texts), f"the key {name} was written down"
    for process in [psutil.Process(pools.service.process.pid), *pools.service.processes("")]:
        assert not any(key in " ".join(process.cmdline()) for key in KEYS.values())


async def test_retry_after_is_true_under_a_load_that_saturates(pools: Pools) -> None:
    """The truth: what the request that was let into the queue next to the refused one really waited."""
    async with client(pools.service.url) as http:
        seen = []
        tasks: list[asyncio.Task[object]] = []

        async def one() -> None:
            seen.append(await stream(http, body(50, service_tier="flex"), bearer("good")))

        # 8 slots of 2 s each serve four a second; six a second come.
        end = time.monotonic() + 16
        while time.monotonic() < end:
            tasks.append(asyncio.create_task(one()))
            await asyncio.sleep(1 / 6)
        await asyncio.wait_for(asyncio.gather(*tasks), 40)
    refused = [s for s in seen if s.status == 429]
    served = [s for s in seen if s.whole]
    assert len(refused) + len(served) == len(seen) and len(refused) > 5 and all(right(s, 50) for s in served)
    errors = []
    for s in refused:
        near = min((t for t in served if abs(t.sent - s.sent) < 2.0), key=lambda t: abs(t.sent - s.sent), default=None)
        if near is not None and s.retry_after:
            errors.append(abs(s.retry_after - float(near.headers["x-glm-queue-ms"]) / 1e3) / s.retry_after)
    print(f"\nRetry-After: {len(refused)} refusals, median error {statistics.median(errors):.0%}", end="")
    assert statistics.median(errors) < 0.5
    await asyncio.to_thread(settle, pools.service, 3.0)


async def test_a_client_s_deadline_cancels_the_work(pools: Pools) -> None:
    async with client(pools.service.url) as http:
        late = await stream(http, body(400), {**bearer("good"), "x-request-timeout": "1"})
    assert (late.end, late.code) == ("error", "deadline_exceeded")
    assert 0.9 < late.ended - late.sent < 3.0
    assert late.text, "it had begun"
    await asyncio.to_thread(settle, pools.service, 2.0)
