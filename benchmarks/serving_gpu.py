"""The whole service beside `vllm serve`, the same file, kernels and settings, on one GPU, in one run.

    python benchmarks/serving_gpu.py FILE [--servers glm5,vllm,rust] [--levels 1,64,256,1024] [--repeats 3]

glm5: `glm5 serve` with Ray and HTTP. vllm: vLLM's own server in Python with our plugin and packed kernels; rust: the
same with VLLM_USE_RUST_FRONTEND=1. All are started at once, each with --kv-gib of KV, and measured in turn, level by
level and repeat by repeat, by `glm5 load sweep` with new prompts each time. CPU a token: of all processes of the server
(client not counted) over the tokens that its own counter says. Prints Markdown, medians of the repeats with least and
most; on a machine without a GPU the CPU build is measured, to try the script.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.kernels_in_engine import paths
from benchmarks.serving import cpu_seconds
from tests.service import free_port
from tests.unit.metrics.read import samples, total
from tests.vllm.faults import plugin_path

COUNTERS = {"glm5": "glm_output_tokens_total", "vllm": "vllm:generation_tokens_total"}


@dataclass
class Server:
    """One under way. `ready_s`: None until it answers."""

    name: str
    process: subprocess.Popen[bytes]
    port: int
    log: Path
    ready_s: float | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def tokens(self) -> float:
        """Generated so far, by its own counter."""
        counter = COUNTERS["glm5" if self.name == "glm5" else "vllm"]
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            return total(samples(answer.read().decode()), counter)

    def answers(self) -> bool:
        path = "/ready" if self.name == "glm5" else "/health"
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}{path}", timeout=5) as answer:
            return bool(answer.status == 200)
        return False


@dataclass(frozen=True)
class Measured:
    """One level of one repeat. `cpu_us`: CPU time a token; times in ms."""

    tok_s: float
    ttft_p50: float
    ttft_p95: float
    itl_p50: float
    itl_p95: float
    cpu_us: float
    failed: int
    invalid: str


def engine_options(given: argparse.Namespace) -> dict[str, Any]:
    """As a profile writes them: the same for all servers."""
    options: dict[str, Any] = {"load_timeout_s": 560, "allow_other_versions": True, "gate": False}
    options |= {key: json.loads(value) for key, value in (pair.split("=", 1) for pair in given.set)}
    if not given.cpu:
        options["extra_args"] = [f"--kv-cache-memory-bytes={given.kv_gib << 30}", *options.get("extra_args", ())]
    return options


def profile(given: argparse.Namespace, place: Path) -> list[str]:
    """The command that serves ours, from a profile in `place`."""
    import yaml

    engine = {"name": "vllm", "cache_dir": str(place / "glm5"), **engine_options(given)}
    pool = {"engine": engine, "slots": given.slots, "cpus": 1 if given.cpu else 2, "gpus": 0 if given.cpu else 1}
    tree = {
        "model": {"path": str(given.file), "name": "m", "context_tokens": given.context},
        "pools": {"shared": pool},
        "ingress": {"replicas": given.ingresses, "cpus": 0.5},
        "admission": {"queue_requests": 4096},
    }
    path = place / "profile.yaml"
    path.write_text(yaml.safe_dump(tree))
    return [sys.executable, "-c", "from service.cli import main; main()", "serve", str(path)]


def peer(given: argparse.Namespace, place: Path, *, rust: bool) -> tuple[list[str], dict[str, str]]:
    """vLLM's own server with what our replica gives its engine: command and variables."""
    from service.engines.vllm import launch
    from service.engines.vllm.attention import choose_attention
    from service.engines.vllm.options import VllmOptions
    from service.gguf.header import read_header
    from service.gguf.materialise import linked_file, materialise

    options = VllmOptions(**engine_options(given))
    header = read_header(given.file)
    attention = choose_attention(header, options.attention, given.context, on_cpu=given.cpu)
    folder = materialise(header, place / "models", attention)
    file = linked_file(folder, header)
    model = launch.Model(file, "m", header.architecture, folder, given.context, given.slots)
    argv = launch.arguments(model, options, on_cpu=given.cpu)
    env = launch.variables(options, os.cpu_count() or 1, place / "progress")
    command = ["-m", "vllm.entrypoints.launchers.api_server.entry"]
    if rust:
        env["VLLM_USE_RUST_FRONTEND"] = "1"
        # The command takes the model as its first argument.
        argv = [str(model.path), *(a for a in argv if not a.startswith("--model="))]
        command = ["-c", "from vllm.entrypoints.cli.main import main; main()", "serve"]
    return [sys.executable, *command, *argv, "--uvicorn-log-level", "warning"], env


@contextlib.contextmanager
def servers(given: argparse.Namespace, place: Path) -> Iterator[list[Server]]:
    """All of --servers, started at once, those that came up; ended at the end."""
    env = os.environ | paths()
    env["PYTHONPATH"] += os.pathsep + plugin_path(place / "plugin", faults=False)
    running: list[Server] = []
    try:
        for name in given.servers.split(","):
            folder = place / name
            folder.mkdir()
            port, log = free_port(), given.logs / f"{name}.log"
            ours = name == "glm5"
            command, more = (profile(given, folder), {}) if ours else peer(given, folder, rust=name == "rust")
            with log.open("wb") as sink:
                process = subprocess.Popen(
                    [*command, "--port", str(port)],
                    stdout=sink, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
                    env=env | more,
                )  # fmt: skip
            running.append(Server(name, process, port, log))
        began = time.monotonic()
        while any(s.ready_s is None and s.process.poll() is None for s in running):
            for server in running:
                if server.ready_s is None and server.answers():
                    server.ready_s = time.monotonic() - began
                    print(f"{server.name} ready after {server.ready_s:.0f} s", flush=True)
            if time.monotonic() - began > given.wait:
                break
            time.sleep(0.5)
        for server in running:
            if server.ready_s is None:
                print(f"{server.name} did not come up:\n{server.log.read_text(errors='replace')[-2500:]}")
        yield [server for server in running if server.ready_s is not None]
    finally:
        for server in running:
            server.process.send_signal(signal.SIGINT)
        for server in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.process.wait(60)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.process.pid, signal.SIGKILL)


def measure(server: Server, streams: int, given: argparse.Namespace, place: Path) -> Measured:
    command = [sys.executable, "-c", "from service.cli import main; main()", "load", "sweep", server.url]
    command += ["--concurrency", str(streams), "--duration", str(given.seconds), "--out", str(place), "--overwrite"]
    command += ["--input-tokens", str(given.tokens), "--output-tokens", str(given.tokens), "--json"]
    command += ["--timeout", "120"]
    tokens, cpu = server.tokens(), cpu_seconds(server.process.pid)
    done = subprocess.run(command, env=os.environ | paths(), capture_output=True, text=True, timeout=300, check=False)
    cpu, tokens = cpu_seconds(server.process.pid) - cpu, server.tokens() - tokens
    try:
        level = json.loads((place / "summary.json").read_text())["levels"][0]
    except (OSError, IndexError):
        raise SystemExit(f"{server.name} at {streams}: {done.stderr[-1500:]}{done.stdout[-500:]}") from None
    found = level["measured"]
    ms = [1e3 * found[name][q] if found[name] else float("nan") for name in ("ttft", "itl") for q in ("p50", "p95")]
    return Measured(
        found["output_tok_s"] or 0.0, *ms, 1e6 * cpu / max(tokens, 1), found["failed"], "; ".join(level["reasons"])
    )


def table(runs: dict[tuple[int, str], list[Measured]]) -> Iterator[str]:
    yield "| streams | server | tok/s | least to most | TTFT p50 ms | p95 | ITL p50 ms | p95 | CPU µs/token | failed |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for (streams, name), found in runs.items():

        def middle(field: str, found: list[Measured] = found) -> float:
            return statistics.median(getattr(one, field) for one in found)

        rates = [one.tok_s for one in found]
        ms = " | ".join(f"{middle(field):.1f}" for field in ("ttft_p50", "ttft_p95", "itl_p50", "itl_p95"))
        yield (
            f"| {streams} | {name} | {middle('tok_s'):.0f} | {min(rates):.0f} to {max(rates):.0f} | {ms} "
            f"| {middle('cpu_us'):.0f} | {sum(one.failed for one in found)} |"
        )
    for (streams, name), found in runs.items():
        for reason in sorted({one.invalid for one in found if one.invalid}):
            yield f"\n{name} at {streams}: {reason}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--servers", default="glm5,vllm,rust")
    parser.add_argument("--levels", default="1,64,256,1024")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="of a prompt, and of an answer")
    parser.add_argument("--slots", type=int, default=1024)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--ingresses", type=int, default=2)
    parser.add_argument("--kv-gib", type=int, default=16)
    parser.add_argument("--wait", type=float, default=400, help="seconds for all to come up")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=JSON", help="a setting of the engine")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()), help="folder of the servers' logs")
    given = parser.parse_args()
    import torch
    import vllm

    given.cpu = not torch.cuda.is_available()
    given.file = given.file.resolve()
    card = "CPU" if given.cpu else torch.cuda.get_device_name()
    print(f"{card}, {os.cpu_count()} cores, torch {torch.__version__}, vLLM {vllm.__version__}, ", end="")
    print(f"{given.file.name}, {given.tokens} tokens in and out, {time.strftime('%Y-%m-%d')}", flush=True)
    runs: dict[tuple[int, str], list[Measured]] = {}
    levels = [int(level) for level in given.levels.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        with servers(given, place) as up:
            for repeat in range(given.repeats):
                for streams in levels:
                    # Each begins in turn: what the machine does meanwhile meets all alike.
                    for server in up[repeat % len(up) :] + up[: repeat % len(up)]:
                        found = measure(server, streams, given, place / "run")
                        runs.setdefault((streams, server.name), []).append(found)
                        print(f"{server.name} {streams}: {found}", file=sys.stderr, flush=True)
    for line in table(dict(sorted(runs.items()))):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
