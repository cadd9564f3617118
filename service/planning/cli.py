"""`glm5 plan`, `glm5 explain`, `glm5 simulate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from service.address import base_url
from service.errors import UserError

plan_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
explain_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
simulate_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

HardwareOption = Annotated[
    str, typer.Option("--hardware", help="Box of the catalogue (--list) or the JSON that glm5 preflight wrote.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@plan_app.command()
def plan(
    file: Annotated[str | None, typer.Argument(help="GGUF file, `demo`, or nothing with --shape.")] = None,
    shape: Annotated[str | None, typer.Option(help="Built-in shape instead of a file, such as glm-5.")] = None,
    hardware: HardwareOption = "8x-rtx-pro-6000",
    context: Annotated[int, typer.Option(min=1, help="Tokens of prompt and answer that a request may hold.")] = 8192,
    concurrency: Annotated[int, typer.Option(min=1, max=4096, help="Requests decoded at once.")] = 32,
    tp: Annotated[int | None, typer.Option(min=1, help="Tensor parallelism. Default: all GPUs of the box.")] = None,
    mtp: Annotated[int, typer.Option(min=0, max=16, help="Draft tokens of speculative decoding.")] = 0,
    acceptance: Annotated[float, typer.Option(min=0, max=0.99, help="Chance that a drafted token is kept.")] = 0.62,
    eager: Annotated[bool, typer.Option("--eager", help="Without CUDA graphs.")] = False,
    kernels: Annotated[str, typer.Option(help="hybrid (ours), plugin, marlin or bf16.")] = "hybrid",
    sparse: Annotated[bool, typer.Option("--sparse", help="Sparse attention (indexer) instead of dense MLA.")] = False,
    kv: Annotated[str, typer.Option(help="KV cache: bf16 or fp8.")] = "bf16",
    allreduce: Annotated[str, typer.Option(help="default, best, or an algorithm of the link.")] = "default",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the best settings as a profile.")] = None,
    boxes: Annotated[
        int, typer.Option(min=1, max=4096, help="Boxes that the profile is for; two or more: two pools.")
    ] = 1,
    plot: Annotated[Path | None, typer.Option(help="Write a picture (png, svg, pdf).")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List shapes and boxes, then stop.")] = False,
    json_: JsonOption = False,
) -> None:
    """Predict fit, speed and best settings of a model on a machine.

    Examples: `glm5 plan --shape glm-5 --hardware 8x-rtx-pro-6000 --mtp 3`, `glm5 plan demo --hardware cpu-2core`,
    `glm5 plan model.gguf --hardware preflight.json -o profile.yaml && glm5 serve profile.yaml`.

    Exit 0 if it fits, 1 if it does not, 2 for bad input.
    """
    from rich.console import Console

    from service.planning import glm5, profile, show
    from service.planning import hardware as catalogue
    from service.planning import plan as planner
    from service.planning.settings import EngineSettings
    from service.planning.sources import model_shape

    console = Console()
    if list_:
        show.show_catalogue(
            {name: model_shape(name) for name in glm5.MIXES},
            [catalogue.box(b) for b in catalogue.names("boxes")],
            console,
        )
        return
    if bool(file) == bool(shape):
        raise UserError("give either a GGUF file or --shape glm-5 (glm5 plan --list shows the shapes)")
    if kv not in ("bf16", "fp8"):
        raise UserError(f"--kv is bf16 or fp8, not {kv!r}")
    model = model_shape(shape or file or "")
    box = catalogue.box(hardware)
    settings: dict[str, Any] = {
        "tp": tp or box.gpus,
        "slots": concurrency,
        "draft_tokens": mtp,
        "acceptance": acceptance,
        "graphs": not eager,
        "kernels": kernels,
        "attention": "sparse" if sparse else "dense",
        "kv_value_bytes": 1.0 if kv == "fp8" else 2.0,
        "allreduce": allreduce,
    }
    if box.gpu.is_cpu:
        settings |= {"runtime": "llamacpp", "kernels": "llamacpp", "graphs": False, "tp": 1, "draft_tokens": 0}
    made = planner.make(model, box, EngineSettings(**settings), context=context, concurrency=concurrency)
    if json_:
        typer.echo(json.dumps(show.plan_json(made), indent=1))
    else:
        show.show_plan(made, console)
    if plot:
        from service.planning.plots import plot_plan

        plot_plan(made, plot)
        typer.echo(f"wrote {plot}", err=True)
    if output and not made.modes:
        typer.echo(f"{output} is not written: no settings of this box hold this model", err=True)
    elif output:
        _write(output, profile.profile_text(made, file or "GLM-5.gguf", boxes))
        typer.echo(f"wrote {output}: glm5 serve {output}", err=True)
    if not made.fits:
        raise typer.Exit(1)


@explain_app.command()
def explain(
    url: Annotated[str, typer.Option(help="Where the service is.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="GGUF file or shape; default: as the service says.")] = None,
    hardware: Annotated[
        str | None, typer.Option(help="Box of the catalogue or preflight JSON. Default: this machine's CPU, measured.")
    ] = None,
    pool: Annotated[str | None, typer.Option(help="Pool; default: the one that decoded most.")] = None,
    seconds: Annotated[float, typer.Option(min=0, max=3600, help="Watch so long; 0: since the service began.")] = 5.0,
    kernels: Annotated[str, typer.Option(help="hybrid, plugin, marlin or bf16 (vLLM).")] = "hybrid",
    eager: Annotated[bool, typer.Option("--eager", help="The service runs without CUDA graphs.")] = False,
    mtp: Annotated[int, typer.Option(min=0, max=16, help="Draft tokens that the service uses.")] = 0,
    trace: Annotated[
        Path | None, typer.Option(help="torch profiler trace of one rank, for the measured split.")
    ] = None,
    profile: Annotated[
        float | None,
        typer.Option(min=0.1, max=10, help="Look into the steps for so many seconds (vLLM; engine.profiler: true)."),
    ] = None,
    key: Annotated[
        str | None, typer.Option(envvar="GLM5_API_KEY", help="An operator's API key, where one is asked for.")
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Split the live service's decode step, predicted beside measured, and name the culprit.

    Reads /metrics twice and /v1/models once. Run it while the service decodes (glm5 load makes load). The last line
    says what limits the step and which setting would help most, by the step model. With --profile (or --trace FILE) the
    culprit is measured, by a torch profiler in the engine, not predicted.

    Exit 0, 1 if nothing was decoded in that time, 2 for bad input.
    """
    from rich.console import Console

    from service.planning import live
    from service.planning.explain import explain as split
    from service.planning.show_explain import explanation_json, show_explanation
    from service.planning.trace import read_trace

    if trace and profile:
        raise UserError("give one of --trace and --profile")
    url, measured = base_url(url), read_trace(trace) if trace else None
    card = live.card(url, key)
    wish = live.Wish(model, hardware, kernels, graphs=not eager, draft_tokens=mtp)
    with Console(stderr=True).status("reading the service's metrics"):
        before, now = live.scrapes(url, seconds, key)
        described = live.model_of(card, wish, url, now)
        name = pool or live.busiest(before, now)
        if profile:
            measured = live.profile(url, name, profile, key)
    found = split(described, before, now, name, measured, live.crowded(url))
    if json_:
        typer.echo(json.dumps(explanation_json(found), indent=1))
    else:
        show_explanation(found, described, Console())
    if found.measured_s is None:
        raise typer.Exit(1)


@simulate_app.command()
def simulate(
    trace: Annotated[
        str,
        typer.Argument(
            help="CSV (arrived_s, prompt_tokens, output_tokens[, tier, mode]), an Azure LLM "
            "trace, or poisson:RATE:SECONDS[:PROMPT:OUTPUT[:PRIORITY_SHARE]]."
        ),
    ],
    boxes: Annotated[int, typer.Option(min=1, max=65536, help="Boxes; each holds one replica.")] = 1,
    latency_boxes: Annotated[int, typer.Option(min=0, help="Of these, boxes of the latency pool. 0: one pool.")] = 0,
    profile: Annotated[Path | None, typer.Option(help="Take slots, queue and routing from this profile.")] = None,
    model: Annotated[str, typer.Option(help="Shape or GGUF file.")] = "glm-5",
    hardware: HardwareOption = "8x-rtx-pro-6000",
    mtp: Annotated[bool, typer.Option("--mtp", help="Speculative decoding outside the throughput pool.")] = False,
    scale: Annotated[
        bool, typer.Option("--scale", help="Start with half of the boxes and let the policy scale.")
    ] = False,
    load_s: Annotated[float, typer.Option(min=0, help="Seconds that a new replica loads.")] = 300.0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Longest wait for a slot, seconds.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Of the arrivals and of the choice between replicas.")] = 1,
    json_: JsonOption = False,
) -> None:
    """Run a trace through a simulated fleet in virtual time.

    Routing, admission and scaling are the service's own code; replicas take their step and prefill times from the step
    model. Example: `glm5 simulate poisson:400:600 --boxes 256 --latency-boxes 64`.

    Exit 0, 1 if requests were refused or timed out, 2 for bad input.
    """
    import time

    from rich.console import Console

    from service.planning import fleet_report, workload
    from service.planning import simulate as runner
    from service.planning.show_fleet import show_report

    config = None
    if profile is not None:
        from service.config import load

        config = load(profile)
    arrivals = workload.read(trace, seed)
    if not arrivals:
        raise UserError(f"{trace} holds no requests")
    wish = runner.FleetWish(boxes, latency_boxes, model, hardware, mtp, scale, load_s, timeout, seed)
    runner.specs(wish, config)
    began = time.perf_counter()
    with Console(stderr=True).status("simulating") as status:

        def progress(now: float, done: int) -> None:
            status.update(f"simulating: {done:,} of {len(arrivals):,} requests, {now:,.0f} s of virtual time")

        run = runner.simulate(arrivals, wish, config, progress)
    wall = time.perf_counter() - began
    found = fleet_report.report(run)
    if json_:
        typer.echo(json.dumps(fleet_report.report_json(found, wall), indent=1))
    else:
        show_report(found, wall, Console())
    if found.outcomes.get("ok", 0) < found.requests:
        raise typer.Exit(1)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as fault:
        raise UserError(f"cannot write {path}: {fault.strerror}") from None
