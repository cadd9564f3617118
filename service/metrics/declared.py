"""Every metric of the service, declared once: name with unit, help, labels from closed sets, and how processes add up.

One `Metrics` a process, made by whoever starts the process and passed on. Counters and histograms of several processes
are summed; a gauge says in its declaration whether the service's value is the sum or the largest of its processes'.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

Merge = Literal["sum", "max"]

TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
ITL_S = (
    *(0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1),
    *(0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0),
)
E2EL_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0)
QUEUE_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0)
STEP_S = (
    *(0.0005, 0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5),
)
LOAD_S = (0.01, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0, 2560.0)


class Metrics:
    """All metrics of one process, in a registry of its own.

    `before_collect(f)`: f is called before every reading, so that a value that grows with time alone (busy seconds
    while nothing starts or ends) is exact at that moment.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self.merging: dict[str, Merge] = {}
        self.bounds: dict[str, tuple[float, ...]] = {}
        """Upper bounds of each histogram's buckets, without +Inf."""
        self._before: list[Callable[[], None]] = []
        by_class = ("pool", "tier")

        # The core pair, and what else a replica counts.
        self.output_tokens = self._counter("glm_output_tokens", "Tokens generated.", by_class)
        self.prompt_tokens = self._counter("glm_prompt_tokens", "Tokens of prompts read.", by_class)
        self.cached_tokens = self._counter(
            "glm_prompt_cached_tokens", "Prompt tokens that came from a cache.", by_class
        )
        self.tokens_by_concurrency = self._counter(
            "glm_output_tokens_by_concurrency",
            "Tokens generated, by how many requests the replica was decoding at that moment.",
            ("pool", "concurrency"),
        )
        self.busy_by_concurrency = self._counter(
            "glm_busy_seconds_by_concurrency",
            "Seconds a replica spent decoding, by how many requests it was decoding.",
            ("pool", "concurrency"),
        )
        self.replica_starts = self._counter("glm_replica_starts", "Engine replicas started.", ("pool",))
        self.drafted_tokens = self._counter("glm_speculative_drafted_tokens", "Speculative tokens proposed.", ("pool",))
        self.accepted_tokens = self._counter("glm_speculative_accepted_tokens", "Speculative tokens kept.", ("pool",))
        self.decode_step = self._histogram(
            "glm_decode_step_seconds", "Time of one decode step, measured by the engine.", ("pool",), STEP_S
        )
        self.decode_step_predicted = self._gauge(
            "glm_decode_step_predicted_seconds",
            "Time of a decode step as planned for the present batch.",
            ("pool",),
            "max",
        )
        self.predicted_tokens = self._gauge(
            "glm_predicted_tokens_per_second",
            "Tok/s of one replica as planned, by requests decoding at once.",
            ("pool", "concurrency"),
            "max",
        )
        self.load_phase = self._histogram(
            "glm_load_phase_seconds", "Time a replica spent in a phase of its start.", ("pool", "phase"), LOAD_S
        )
        self.slots = self._gauge("glm_slots", "Requests that ready replicas can decode at once.", ("pool",), "sum")
        self.running = self._gauge("glm_requests_running", "Requests inside engines.", ("pool",), "sum")
        self.waiting = self._gauge("glm_requests_waiting", "Requests inside engines that wait there.", ("pool",), "sum")
        self.decoding = self._gauge(
            "glm_requests_decoding", "Requests that have begun to produce tokens.", ("pool",), "sum"
        )
        self.kv_used = self._gauge(
            "glm_kv_used_ratio", "Share of the KV cache in use, fullest replica, 0 to 1.", ("pool",), "max"
        )
        self.replicas_ready = self._gauge("glm_replicas_ready", "Engine replicas that can serve.", ("pool",), "sum")
        self.kernel_fallback = self._gauge(
            "glm_kernel_fallback", "1 where an engine runs on slow fallback kernels.", ("pool",), "max"
        )

        # What an ingress counts.
        self.requests = self._counter("glm_requests", "Requests ended, by how.", ("endpoint", *by_class, "outcome"))
        self.in_flight = self._gauge(
            "glm_requests_in_flight", "Requests that have arrived and not ended.", ("endpoint",), "sum"
        )
        self.queued = self._gauge("glm_requests_queued", "Requests that wait for a slot.", ("pool",), "sum")
        self.ttft = self._histogram("glm_ttft_seconds", "Arrival to first token, streamed requests.", by_class, TTFT_S)
        self.itl = self._histogram("glm_itl_seconds", "Gap before each further token of a stream.", by_class, ITL_S)
        self.e2el = self._histogram("glm_e2el_seconds", "Arrival to end, requests that ended well.", by_class, E2EL_S)
        self.queue = self._histogram("glm_queue_seconds", "Wait for admission.", by_class, QUEUE_S)
        self.rejections = self._counter("glm_rejections", "Requests refused before they got a slot.", ("reason",))
        self.routed = self._counter("glm_routing_decisions", "Pools chosen for requests.", ("pool", "reason"))

        # What control decides.
        self.scaling = self._counter(
            "glm_scaling_decisions", "Decisions on the number of replicas.", ("pool", "direction", "reason")
        )
        self.conversions = self._counter(
            "glm_conversion_decisions", "Decisions on reloading a replica in another mode.", ("mode", "done", "reason")
        )
        self.replicas_target = self._gauge("glm_replicas_target", "Replicas wanted.", ("pool",), "max")
        self.replicas_max = self._gauge("glm_replicas_max", "Replicas at most.", ("pool",), "max")
        self.schema = self._schema()

    def before_collect(self, settle: Callable[[], None]) -> None:
        self._before.append(settle)

    def settle(self) -> None:
        """Bring time-driven values up to now. Call from the thread that records."""
        for settle in self._before:
            settle()

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, labels: tuple[str, ...], merge: Merge) -> Gauge:
        self.merging[name] = merge
        return Gauge(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, labels: tuple[str, ...], bounds: tuple[float, ...]) -> Histogram:
        self.bounds[name] = bounds
        return Histogram(name, text, labels, registry=self.registry, buckets=bounds)

    def _schema(self) -> dict[str, tuple[str, str, str]]:
        """Family name -> (type, help, how gauges add up: `sum`, `max` or empty). Counters' names end in `_total`."""
        found = {}
        for family in self.registry.collect():
            name = f"{family.name}_total" if family.type == "counter" else family.name
            found[name] = (family.type, family.documentation, self.merging.get(name, ""))
        return found
