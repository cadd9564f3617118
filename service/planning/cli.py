"""`glm5 plan`, `glm5 explain`, `glm5 simulate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

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

    if list_:
        typer.echo(f"shapes: {', '.join([*glm5.MIXES, 'demo'])}\nboxes: {', '.join(catalogue.names('boxes'))}")
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
        show.show_plan(made, Console())
    if plot:
        from service.planning.plots import plot_plan

        plot_plan(made, plot)
        typer.echo(f"wrote {plot}", err=True)
    if output:
        _write(output, profile.profile_text(made, file or "GLM-5.gguf"))
        typer.echo(f"wrote {output}: glm5 serve {output}", err=True)
    if not made.fits:
        raise typer.Exit(1)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as fault:
        raise UserError(f"cannot write {path}: {fault.strerror}") from None
