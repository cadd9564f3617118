"""Explaining a service from its metrics: figures made by the service's own recorders, read back over HTTP."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from typer.testing import CliRunner

from service.errors import UserError
from service.metrics.declared import Metrics
from service.metrics.top import Scrape
from service.planning import live
from service.planning.cli import explain_app
from service.planning.explain import best_advice, bounds, explain
from service.planning.step_model import StepModel, step_model
from service.planning.trace import cause, read_trace, split_events


def reading(at: float, *, steps: int, step_s: float, tokens: dict[str, float], busy: dict[str, float]) -> Scrape:
    """A scrape of a service that has decoded so much, rendered and parsed as Prometheus text."""
    metrics = Metrics()
    for _ in range(steps):
        metrics.decode_step.labels("shared").observe(step_s)
    for label, value in tokens.items():
        metrics.tokens_by_concurrency.labels("shared", label).inc(value)
        metrics.output_tokens.labels("shared", "default").inc(value)
    for label, value in busy.items():
        metrics.busy_by_concurrency.labels("shared", label).inc(value)
    metrics.slots.labels("shared").set(8)
    metrics.rejections.labels("overloaded").inc(0)
    return Scrape.parse(generate_latest(metrics.registry).decode(), at)


def served_as_predicted(model: StepModel, running: int, seconds: float) -> Scrape:
    step = model.decode_step_s(running, 0)
    label = {1: "1", 8: "5-8"}[running]
    made = seconds / step * running
    return reading(1.0, steps=100, step_s=step, tokens={label: made}, busy={label: seconds})


def test_a_service_that_runs_as_predicted_names_the_models_bottleneck():
    model = step_model("glm-5", "8x-rtx-pro-6000-reference", kernels="plugin", slots=8)
    found = explain(model, None, served_as_predicted(model, 1, 2.0), "shared")
    assert found.running == 1
    assert found.measured_s == pytest.approx(model.decode_step_s(1, 0), rel=1e-6)
    assert found.culprit == "allreduce"
    assert "all-reduces" in found.sentence
    assert found.advice is not None
    assert found.advice.setting in found.sentence
    bucket = found.buckets[0]
    assert bucket.measured_tok_s == pytest.approx(model.tokens_per_s(1), rel=1e-6)
    assert bucket.predicted_low == bucket.predicted_high == pytest.approx(model.tokens_per_s(1))


def test_a_step_far_beyond_the_model_is_not_blamed_on_a_part():
    model = step_model("demo", "cpu-2core", slots=8)
    slow = reading(1.0, steps=50, step_s=0.03, tokens={"1": 100.0}, busy={"1": 3.0})
    found = explain(model, None, slow, "shared", note="load average 9.0 on 2 cores")
    assert found.culprit == "unexplained"
    assert "explain (load average 9.0 on 2 cores)" in found.sentence
    assert found.unexplained == pytest.approx(0.03 - found.predicted.total)
    assert "than this model and hardware explain" in found.sentence


def test_only_what_happened_between_two_readings_counts():
    model = step_model("demo", "cpu-2core", slots=8)
    before = reading(0.0, steps=100, step_s=0.5, tokens={"1": 200.0}, busy={"1": 50.0})
    now = reading(5.0, steps=100, step_s=0.5, tokens={"1": 200.0, "5-8": 600.0}, busy={"1": 50.0, "5-8": 4.0})
    # the histogram did not move: the step comes from tokens and seconds
    found = explain(model, before, now, "shared")
    assert [b.label for b in found.buckets] == ["5-8"]
    assert found.source.startswith("tokens and busy seconds")
    assert found.measured_s == pytest.approx(6.5 / 150.0)


def test_nothing_decoded_is_said():
    model = step_model("demo", "cpu-2core", slots=8)
    idle = reading(0.0, steps=0, step_s=1.0, tokens={}, busy={})
    found = explain(model, idle, idle, "shared")
    assert found.measured_s is None
    assert "Nothing was decoded" in found.sentence


def test_advice_names_what_helps_most():
    eager = step_model("glm-5", "8x-h200", graphs=False, slots=8)
    advice = best_advice(eager, 1, 1000)
    assert advice is not None
    assert advice.setting == "CUDA graphs on"
    plugin = step_model("glm-5", "8x-rtx-pro-6000", kernels="plugin", slots=64)
    advice = best_advice(plugin, 64, 64 * 500)
    assert advice is not None
    assert "kernels" in advice.setting or "draft" in advice.setting
    cpu = best_advice(step_model("demo", "cpu-2core", slots=8), 1, 0)
    assert cpu is not None
    assert "more requests at once" in cpu.setting  # memory-bound: the weights are read once for all


def test_bucket_labels():
    assert [bounds(label) for label in ("1", "3-4", "1025+")] == [(1, 1), (3, 4), (1025, 2050)]


def kernel(name: str, ts: float, dur: float) -> dict[str, Any]:
    return {"cat": "kernel", "name": name, "ts": ts, "dur": dur}


EVENTS = [
    kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 0, 100),
    kernel("nvjet_hsh_128x64_gemm", 110, 50),
    kernel("flash_fwd_mla_combine_kernel", 160, 20),
    kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 170, 30),  # overlaps attention by 10
    kernel("vectorized_elementwise_kernel", 210, 5),
    {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 500},
]


GLM5_STEP = {
    # names of a decode step of GLM-5's layers on an H200, as torch's profiler wrote them (shortened)
    "linear_kernel": "gemm",
    "w13_pair_kernel": "gemm",
    "w2_pair_kernel": "gemm",
    "w13_group_kernel": "gemm",
    "w2_group_kernel": "gemm",
    "prepare_kernel": "gemm",
    "sum_kernel": "gemm",
    "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_splitK_TNT": "gemm",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float>": "gemm",
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::Col": "attention",
    "void cutlass::device_kernel<flash::FlashAttnFwdCombine<cute::tuple<cute::C<8>, cute::C<128": "attention",
    "void vllm::concat_and_cache_mla_kernel<__nv_bfloat16, __nv_bfloat16, (vllm::Fp8KVCacheData": "attention",
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(vllm::RankData*, vllm::RankSignals": "allreduce",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "allreduce",
    "void vllm::rms_norm_kernel<c10::BFloat16, 8, 2, true>(c10::BFloat16*, c10::BFloat16 const*": "other",
    "void vllm::rotary_embedding_kernel<c10::BFloat16, c10::BFloat16, false>(long const*, c10::": "other",
    "void at::native::sbtopk::gatherTopK<float, unsigned int, 1, false>(at::cuda::detail::Tenso": "other",
    "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat1": "other",
}


@pytest.mark.parametrize(("name", "kind"), GLM5_STEP.items())
def test_a_kernels_cause(name: str, kind: str) -> None:
    assert cause(name) == kind


def test_a_profile_is_split_by_hand():
    split = split_events(EVENTS)
    assert {k: round(v * 1e6, 6) for k, v in split.items()} == {
        "allreduce": 120.0,
        "attention": 20.0,
        "gemm": 50.0,
        "other": 5.0,
        "idle": 20.0,
    }
    assert sum(split.values()) == pytest.approx(215e-6)


def test_a_profile_without_gpu_kernels_counts_the_computing_threads_operators():
    def op(name: str, ts: float, dur: float, thread: int = 1) -> dict[str, Any]:
        return {"cat": "cpu_op", "name": name, "ts": ts, "dur": dur, "pid": 7, "tid": thread}

    events = [
        op("aten::linear", 0, 60),
        op("aten::addmm", 10, 40),  # within the one before: counted once
        op("vllm::unified_attention_with_output", 70, 20),
        op("aten::mm", 0, 50, thread=2),  # another thread, less busy
    ]
    split = {k: round(v * 1e6, 6) for k, v in split_events(events).items() if v}
    assert split == {"gemm": 60.0, "idle": 10.0, "attention": 20.0}


def test_a_profile_file(tmp_path: Path):
    path = tmp_path / "rank0.pt.trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": EVENTS}).encode()))
    model = step_model("glm-5", "8x-rtx-pro-6000-reference", slots=8)
    found = explain(model, None, served_as_predicted(model, 1, 1.0), "shared", read_trace(path))
    assert found.culprit == "allreduce"
    assert "56% of the step" in found.sentence
    for text in (b"{", b"[]", b'{"traceEvents": []}'):
        (tmp_path / "bad.json").write_bytes(text)
        with pytest.raises(UserError):
            read_trace(tmp_path / "bad.json")


@pytest.fixture
def service() -> Iterator[tuple[str, dict[str, Any]]]:
    """A small HTTP server with /v1/models and /metrics of a llama.cpp service that decodes between two readings."""
    state: dict[str, Any] = {"reads": 0, "status": 200, "engine": "llamacpp", "decoding": True}
    metrics = Metrics()
    metrics.slots.labels("shared").set(8)
    metrics.rejections.labels("overloaded").inc(0)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.do_GET()

        def do_GET(self) -> None:
            if "body" in state:
                body = state["body"]
            elif self.path == "/v1/models":
                card = {"id": "m", "engine": state["engine"], "architecture": "llama", "parameters": 134515008}
                body = json.dumps({"data": [card]}).encode()
            else:
                if state["decoding"]:
                    metrics.output_tokens.labels("shared", "default").inc(160)
                    metrics.tokens_by_concurrency.labels("shared", "1").inc(160)
                    metrics.busy_by_concurrency.labels("shared", "1").inc(1.0)
                body = generate_latest(metrics.registry)
            self.send_response(state["status"])
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", state
    server.shutdown()
    server.server_close()
    thread.join(timeout=5)


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (200, b"<html>a web page</html>", "answered no JSON; give --url"),
        (400, b'{"error": {"message": "the profiler is off"}}', "answered 400: the profiler is off"),
        (502, b"<html>bad gateway</html>", "answered 502: give --url"),
        (404, b'{"error": "not found"}', "answered 404: give --url"),
    ],
)
def test_what_is_no_service_is_told_in_one_sentence(
    service: tuple[str, dict[str, Any]], status: int, body: bytes, words: str
):
    url, state = service
    state |= {"status": status, "body": body}
    for read in (lambda: live.card(url, None), lambda: live.profile(url, "shared", 0.1, "key")):
        with pytest.raises(UserError, match=words):
            read()


def test_the_command_reads_a_service(service: tuple[str, dict[str, Any]]):
    url, state = service
    arguments = ["--url", url, "--seconds", "0.1", "--hardware", "cpu-2core"]
    result = CliRunner().invoke(explain_app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    tree = json.loads(result.stdout)
    assert tree["measured_step_ms"] == pytest.approx(6.25, rel=1e-3)
    assert tree["predicted_step_ms"] == pytest.approx(
        6.1, rel=0.1
    )  # memory-bound: the file over 15.8 GB/s, and some KV
    assert tree["culprit"] == "weights"
    shown = CliRunner().invoke(explain_app, arguments)
    assert tree["advice"]["setting"].split()[0] in shown.stdout
    state["decoding"] = False
    assert CliRunner().invoke(explain_app, arguments).exit_code == 1


def test_the_command_refuses_what_it_cannot_know(service: tuple[str, dict[str, Any]]):
    url, state = service

    def fault(*arguments: str) -> str:
        result = CliRunner().invoke(explain_app, ["--url", url, "--seconds", "0", *arguments])
        assert isinstance(result.exception, UserError), result.output
        return str(result.exception)

    assert "B weights" in fault("--model", "glm-5", "--hardware", "cpu-2core")
    state["engine"] = "vllm"
    assert "say on what" in fault()
    state["status"] = 503
    assert "503" in fault()
    result = CliRunner().invoke(explain_app, ["--url", "http://127.0.0.1:1", "--seconds", "0"])
    assert isinstance(result.exception, UserError)
