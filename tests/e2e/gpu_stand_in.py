"""What a box with GPUs would expose, for panels that no CPU can fill: names checked against their sources elsewhere.

Our own metrics come from real recorders (a pool with MTP drafts, a KV pool, a step model, an autoscaler) and leave in
Ray's spelling, as Ray's agent exports them; vLLM's in all three spellings; DCGM's as its exporter writes them.
"""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from service.http.backend import Served
from service.metrics.declared import Metrics
from service.metrics.exchange import snapshot, updates
from service.metrics.recorders import ControlRecorder, IngressRecorder, ReplicaRecorder
from service.types import Delta, EngineStats

GPUS, HOST = 8, "gpu-box-1"


class GpuStandIn:
    def __init__(self) -> None:
        self._began = time.monotonic()
        self._metrics = Metrics()
        self._replica = ReplicaRecorder(self._metrics, "latency", 4)
        self._ingress = IngressRecorder(self._metrics)
        self._control = ControlRecorder(self._metrics, ["latency"])
        self._steps = 0
        self._registry = CollectorRegistry()
        self._running = Gauge("vllm:num_requests_running", "x", registry=self._registry)
        self._waiting = Gauge("vllm_num_requests_waiting", "x", registry=self._registry)
        self._kv = Gauge("ray_vllm_kv_cache_usage_perc", "x", registry=self._registry)
        self._preempted = Counter("ray_vllm_num_preemptions", "x", registry=self._registry)
        self._batch = Histogram("ray_vllm_iteration_tokens_total", "x", buckets=(1, 8, 64), registry=self._registry)

    def text(self) -> str:
        """One reading; the stand-in works a little at each."""
        self._work()
        return "\n".join((self._ours(), generate_latest(self._registry).decode(), *self._dcgm())) + "\n"

    def _work(self) -> None:
        self._steps += 50
        with self._ingress.request("chat") as outer, self._replica.request("priority") as inner:
            outer.served(Served("priority", "latency", 0.01))
            for _ in range(4):
                outer.chunk(Delta(output_tokens=3, prompt_tokens=5))
                inner.chunk(Delta(output_tokens=3, prompt_tokens=5))
        self._ingress.routed("latency", "tier")
        drafted, accepted = 3 * self._steps, 2 * self._steps
        busy = self._steps * 0.018
        self._replica.engine(
            EngineStats(4, running=1, steps=self._steps, busy_s=busy, kv_used=0.4, drafted=drafted, accepted=accepted)
        )
        self._replica.predicted_step(0.016)
        self._replica.load_phase("reading weights", 160.0)
        self._control.replicas("latency", 1, 2)
        self._control.scaling("latency", "up", "wait")
        self._control.conversion("latency", False, "gain_too_small")
        self._running.set(2)
        self._waiting.set(1)
        self._kv.set(0.4)
        self._preempted.inc()
        self._batch.observe(9)

    def _ours(self) -> str:
        lines = []
        for update in updates(b"", snapshot(self._metrics)):
            labels = ",".join(f'{name}="{value}"' for name, value in update.labels)
            suffix = "_total" if update.kind == "counter" and not update.name.endswith("_total") else ""
            lines.append(f"ray_{update.name}{suffix}{{{labels}}} {update.value!r}")
        return "\n".join(sorted(lines))

    def _dcgm(self) -> list[str]:
        seconds = time.monotonic() - self._began
        per_gpu = {
            "DCGM_FI_DEV_SM_CLOCK": lambda gpu: 2400 - gpu,
            "DCGM_FI_DEV_GPU_TEMP": lambda gpu: 60 + gpu,
            "DCGM_FI_DEV_POWER_USAGE": lambda gpu: 250 + gpu,
            "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": lambda gpu: 1e6 + 250e3 * seconds,
            "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": lambda gpu: 0,
            "DCGM_FI_DEV_XID_ERRORS": lambda gpu: 0,
            "DCGM_FI_DEV_FB_USED": lambda gpu: 60_000,
            "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": lambda gpu: 0.1 + gpu / 1000,
            "DCGM_FI_PROF_DRAM_ACTIVE": lambda gpu: 0.2,
            "DCGM_FI_PROF_PCIE_TX_BYTES": lambda gpu: 2e9,
            "DCGM_FI_PROF_PCIE_RX_BYTES": lambda gpu: 2e9,
        }
        return [
            f'{name}{{gpu="{gpu}",UUID="GPU-{gpu}",Hostname="{HOST}"}} {value(gpu)}'
            for name, value in per_gpu.items()
            for gpu in range(GPUS)
        ]
