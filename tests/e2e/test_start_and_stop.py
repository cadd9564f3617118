"""How the service starts, refuses to start, and ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.service import GLM5, Service, free_port, running

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).resolve().parents[2]


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([GLM5, "serve", *arguments], capture_output=True, text=True, timeout=120)


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + b"\xff" * 500)
    result = serve("--model", str(bad), "--port", "0")
    assert result.returncode == 2
    assert "bad.gguf" in result.stderr and "Traceback" not in result.stderr
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(bad) in " ".join(p.info["cmdline"] or [])]


def test_errors_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for arguments, words in (
            (["--model", "/nowhere.gguf"], "/nowhere.gguf does not exist"),
            (["--port", str(taken.getsockname()[1])], "Address already in use"),
            (["--set", "pools.shared.slotz=1"], "slots"),
            (["/nowhere.yaml"], "local-cpu.yaml"),
        ):
            began = time.monotonic()
            result = serve(*arguments)
            assert result.returncode == 2 and words in result.stderr, result.stderr
            assert "Traceback" not in result.stderr
            assert time.monotonic() - began < 30, "such a mistake needs no Ray to be found"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_end_lets_running_answers_end(number: signal.Signals) -> None:
    port = free_port()
    engine = "pools.shared.engine={name: simulated, step_ms: 50}"
    process = subprocess.Popen(
        [GLM5, "serve", "--port", str(port), "--set", engine], stderr=subprocess.PIPE, start_new_session=True
    )
    service = Service(f"http://127.0.0.1:{port}", process, Path("/dev/null"))
    seen: list[str] = []
    try:
        service.wait_ready(120)
        body = {"model": service.model, "prompt": "x", "max_tokens": 100, "stream": True}

        def read() -> None:
            with service.client as client, client.stream("POST", "/v1/completions", json=body) as response:
                seen.extend(line for line in response.iter_lines() if line)

        reader = threading.Thread(target=read)
        reader.start()
        deadline = time.monotonic() + 30
        while not seen and time.monotonic() < deadline:
            time.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        reader.join(60)
        assert seen[-1] == "data: [DONE]" and sum('"text":' in line for line in seen) >= 50
        assert process.wait(60) == 0
        assert not [c for c in children if c.is_running() and c.status() != psutil.STATUS_ZOMBIE]
    finally:
        process.kill()
        process.communicate()


def test_the_readme_s_example(service: Service) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    example = example.replace("http://127.0.0.1:8000", service.url)
    result = subprocess.run(
        [str(Path(GLM5).with_name("python")), "-c", example], capture_output=True, text=True, timeout=60
    )
    assert "Paris" in result.stdout, result.stderr


def test_the_readme_s_curl(service: Service) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (body,) = re.findall(r"curl http://127.0.0.1:8000/v1/chat/completions .*?-d '(.*?)'", text, re.DOTALL)
    answer = httpx.post(f"{service.url}/v1/chat/completions", json={**json.loads(body), "max_tokens": 4}, timeout=60)
    assert answer.status_code == 200, answer.text


def test_two_pools_of_simulated_engines_start() -> None:
    pools = "pools={latency: {engine: {name: simulated}, slots: 2}, throughput: {engine: {name: simulated}, slots: 8}}"
    with running("--set", pools) as service, service.client as client:
        body = {"model": service.model, "prompt": "x", "max_tokens": 2}
        for tier, pool in (("priority", "latency"), ("flex", "throughput")):
            answer = client.post("/v1/completions", json={**body, "service_tier": tier})
            assert answer.headers["x-glm-pool"] == pool and answer.json()["service_tier"] == tier


NO_MODEL = "pools.shared.engine={name: simulated, step_ms: 20}"


def family(service: Service) -> tuple[list[psutil.Process], Path]:
    """Everything that a service started, its warden too; and the folder of its token."""
    children = psutil.Process(service.process.pid).children(recursive=True)
    (warden,) = (child for child in children if "deployments.warden" in child.cmdline())
    return children, Path(warden.cmdline()[-2])


def gone(processes: list[psutil.Process]) -> None:
    """Within the warden's time, all of them."""
    _, left = psutil.wait_procs(processes, timeout=30)
    assert not left, left


def started(folder: Path, setting: str = NO_MODEL) -> Service:
    port = free_port()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [GLM5, "serve", "--port", str(port), "--set", setting], stdout=log, stderr=log, start_new_session=True
        )
    return Service(f"http://127.0.0.1:{port}", process, folder / "log")


@pytest.mark.parametrize("victim", ["raylet", "gcs_server"])
def test_a_lost_ray_ends_the_service_in_a_sentence(tmp_path: Path, victim: str) -> None:
    service = started(tmp_path)
    try:
        service.wait_ready(120)
        children, home = family(service)
        (process,) = (child for child in children if child.name() == victim)
        process.kill()
        assert service.process.wait(60) == 1
        last = service.log.read_text().rstrip().splitlines()[-1]
        assert last == f"error: Ray's {victim} (process {process.pid}) ended; the service cannot go on without it"
        gone(children)
        assert not home.exists()
    finally:
        service.process.kill()
        service.process.wait()


def test_a_killed_service_leaves_nothing_behind(tmp_path: Path) -> None:
    service = started(tmp_path)
    try:
        service.wait_ready(120)
        children, home = family(service)
        assert (home / "token").exists()
    finally:
        os.killpg(service.process.pid, signal.SIGKILL)
        service.process.wait()
    gone(children)
    assert not home.exists()


def test_a_load_that_dies_three_times_ends_the_start(tmp_path: Path) -> None:
    """/ready says what became of the try before, and the last line says it too."""
    service = started(tmp_path, "pools.shared.engine={name: simulated, load_s: 300}")
    pool: dict[str, str] = {}
    killed: set[int] = set()
    try:
        deadline = time.monotonic() + 100
        with service.client as client:
            while service.process.poll() is None and time.monotonic() < deadline:
                with contextlib.suppress(httpx.HTTPError):
                    pool = client.get("/ready", timeout=5.0).json()["pools"]["shared"]
                for replica in service.processes("ServeReplica:glm5:shared"):
                    if replica.pid not in killed and pool.get("eta_s"):
                        if len(killed) == 1:
                            assert "try 1 failed: its process died in the phase" in pool["detail"], pool
                        time.sleep(1.0)  # until the launcher has read that it loads
                        replica.kill()
                        killed.add(replica.pid)
                        pool = {}
                time.sleep(0.2)
        assert service.process.wait(60) == 1 and len(killed) == 3
        assert (
            "the shared pool cannot load its model, 3 tries: its process died in the phase" in service.log.read_text()
        )
    finally:
        service.process.kill()
        service.process.wait()
