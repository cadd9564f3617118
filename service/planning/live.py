"""Reading a running service for `glm5 explain`: its metrics, its model card, and the step model that describes it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from service.errors import UserError
from service.metrics.top import Scrape
from service.planning import calibration as calibrations
from service.planning import hardware as catalogue
from service.planning.hardware import Box
from service.planning.settings import EngineSettings
from service.planning.shape import ModelShape
from service.planning.sources import model_shape
from service.planning.step_model import StepModel

TIMEOUT_S = 10.0
PROFILE_TIMEOUT_S = 150.0
LOCAL = ("127.0.0.1", "localhost", "::1")
CROWDED = 1.5  # llama.cpp alone keeps the load at its number of threads
DEMO_PARAMETERS = 134_515_008


@dataclass(frozen=True, slots=True)
class Wish:
    """What the command line says of the service; None: find out."""

    model: str | None
    hardware: str | None
    kernels: str
    graphs: bool
    draft_tokens: int


def card(url: str, key: str | None) -> dict[str, Any]:
    """The first entry of /v1/models. Raises UserError."""
    found = _json(_ask(url, "/v1/models", key=key))
    cards = found.get("data") if isinstance(found, dict) else None
    if not cards:
        raise UserError(f"{url} serves no model yet; wait for /readyz")
    return dict(cards[0])


def scrapes(url: str, seconds: float, key: str | None) -> tuple[Scrape | None, Scrape]:
    """(before, now), `seconds` apart; no `before` where seconds is 0."""
    before = _scrape(url, key) if seconds > 0 else None
    if seconds > 0:
        time.sleep(seconds)
    return before, _scrape(url, key)


def profile(url: str, pool: str, seconds: float, key: str | None) -> dict[str, float]:
    """Measured seconds of one step by cause, from the engine's own profiler. Raises UserError."""
    asked = {"pool": pool, "seconds": seconds}
    found = _json(_ask(url, "/profile", asked, key=key, timeout_s=PROFILE_TIMEOUT_S))
    return {cause: spent / found["steps"] for cause, spent in found["causes_s"].items()}


def busiest(before: Scrape | None, now: Scrape) -> str:
    """The pool that decoded most between the scrapes (else since the start, else any)."""
    name = "glm_output_tokens_total"
    pools = [p for p in now.values(name, "pool") if p != "none"]
    if not pools:
        return "shared"

    def made(pool: str) -> tuple[float, float]:
        every = now.sum(name, pool=pool)
        return every - (before.sum(name, pool=pool) if before else 0.0), every

    return max(pools, key=made)


def model_of(found: dict[str, Any], wish: Wish, url: str, now: Scrape) -> StepModel:
    """The step model of the service whose card is `found`. Raises UserError where it cannot be known."""
    engine = str(found.get("engine", ""))
    shape = _shape(found, wish.model)
    slots = max(1, int(now.sum("glm_slots")))
    if engine == "llamacpp":
        box = catalogue.box(wish.hardware) if wish.hardware else _this_machine(url)
        settings = EngineSettings(tp=1, runtime="llamacpp", kernels="llamacpp", graphs=False, slots=slots)
    else:
        if wish.hardware is None:
            raise UserError(
                f"the service runs {engine}: say on what, --hardware BOX or preflight.json (glm5 plan --list)"
            )
        box = catalogue.box(wish.hardware)
        if box.gpu.is_cpu:
            raise UserError(f"{wish.hardware} has no GPUs, and the step model knows {engine} on GPUs only")
        settings = EngineSettings(
            tp=box.gpus,
            kernels=wish.kernels,  # type: ignore[arg-type]
            graphs=wish.graphs,
            draft_tokens=wish.draft_tokens,
            slots=slots,
        )
    return StepModel(shape, box, settings, calibrations.choose(shape, box, settings))


def _shape(found: dict[str, Any], named: str | None) -> ModelShape:
    parameters = int(found.get("parameters") or 0)
    if named is None:
        if found.get("architecture") == "glm-dsa" or found.get("engine") == "simulated":
            named = "glm-5"
        elif parameters == DEMO_PARAMETERS or "SmolLM2-135M" in str(found.get("id")):
            named = "demo"
        else:
            raise UserError(f"which model is {found.get('id')!r}? say --model FILE.gguf")
    shape = model_shape(named)
    if parameters and abs(shape.parameters / parameters - 1) > 0.02:
        raise UserError(
            f"{named} has {shape.parameters / 1e9:.3g} B weights, the service's {found.get('id')} has "
            f"{parameters / 1e9:.3g} B: give the --model that it serves"
        )
    return shape


def _this_machine(url: str) -> Box:
    """This machine's CPU, its memory bandwidth measured now. Only for a service on this machine."""
    from service.planning.measured import cpu_box
    from service.preflight.real import RealProbe

    if urlsplit(url).hostname not in LOCAL:
        raise UserError(
            "the service runs on another machine: run glm5 preflight -o box.json there, give --hardware box.json"
        )
    host = RealProbe({}).host()
    return cpu_box("this machine", float(host.memory), host.memory_bandwidth, host.cpus)


def crowded(url: str) -> str:
    """Says so if this machine, where it is the service's, has more to do than cores; else empty."""
    if urlsplit(url).hostname not in LOCAL:
        return ""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    return f"load average {load:.1f} on {cores} cores" if load > CROWDED * cores else ""


def _ask(
    url: str, path: str, body: dict[str, Any] | None = None, *, key: str | None = None, timeout_s: float = TIMEOUT_S
) -> Any:
    """GET, or POST where there is a body. Raises UserError with the service's own words where it has some."""
    import httpx

    address, headers = url.rstrip("/") + path, {"authorization": f"Bearer {key}"} if key else {}
    method = "GET" if body is None else "POST"
    try:
        answer = httpx.request(method, address, json=body, headers=headers, timeout=timeout_s)
    except (httpx.HTTPError, httpx.InvalidURL) as fault:
        raise UserError(f"{address} cannot be read ({type(fault).__name__}); give --url of a running service") from None
    if answer.status_code != 200:
        try:
            said = str(answer.json()["error"]["message"])
        except (ValueError, KeyError, TypeError):
            said = "give --url of a running service"
        raise UserError(f"{address} answered {answer.status_code}: {said}")
    return answer


def _json(answer: Any) -> Any:
    try:
        return answer.json()
    except ValueError:
        raise UserError(f"{answer.url} answered no JSON; give --url of a running service") from None


def _scrape(url: str, key: str | None) -> Scrape:
    text = _ask(url, "/metrics", key=key).text
    try:
        found = Scrape.parse(text, time.monotonic())
    except ValueError:
        raise UserError(f"{url}/metrics is not Prometheus text; give --url of a running service") from None
    if "glm_rejections_total" not in found.samples:
        raise UserError(f"{url}/metrics has no metrics of this service; give --url of a running service")
    return found
