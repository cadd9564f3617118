"""`glm5 tune`: find the fastest kernel tiles on the GPU at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from service.errors import UserError

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="rich",
    help="Time every candidate tile of the packed GGUF kernels on this GPU and write the best as its table.\n\n"
    "Takes about five minutes. The table goes where the kernels look for it (one JSON file a GPU model), unless "
    "--out says otherwise; without one, rules of thumb choose the tiles.",
)


@app.callback(invoke_without_command=True)
def tune(
    context: typer.Context,
    out: Annotated[
        Path | None, typer.Option(help="Where to write the table; default: beside the shipped ones.")
    ] = None,
    only: Annotated[str, typer.Option(help="Only shapes whose name contains this, such as 'experts' or 'q_a'.")] = "",
    processes: Annotated[int, typer.Option(min=1, help="Compilers to run at a time.")] = 8,
    bandwidth: Annotated[float, typer.Option(min=0.01, help="TB/s that `floor` is computed with.")] = 4.0,
) -> None:
    """Tune for one TP=8 rank of GLM-5 (the shapes in tune.py)."""
    if context.invoked_subcommand is not None:
        return
    import torch

    if not torch.cuda.is_available():
        raise UserError("glm5 tune needs a CUDA GPU; `glm5 tune resources` works without one")
    from service.engines.vllm.kernels import choose
    from service.engines.vllm.kernels import tune as tuner

    linears = [s for s in tuner.GLM5_LINEARS if only in s.name]
    moes = [s for s in tuner.GLM5_MOE if only in s.name]
    if not linears and not moes:
        names = ", ".join(s.name for s in (*tuner.GLM5_LINEARS, *tuner.GLM5_MOE))
        raise UserError(f"no shape contains {only!r}; the shapes are {names}")
    target = out or choose.TUNED / f"{choose.slug(torch.cuda.get_device_name())}.json"

    def save(table: choose.Table) -> None:
        target.write_text(choose.dump(table, tuner.versions()))

    tuner.tune(linears, moes, choose.LINEAR_M, choose.MOE_M, processes, typer.echo, bandwidth, save)
    typer.echo(f"wrote {target}")


@app.command()
def resources(
    capability: Annotated[int, typer.Option(help="Compute capability: 90 (H200) or 120 (RTX PRO 6000).")] = 120,
) -> None:
    """Compile GLM-5's kernels for a GPU that need not be here; say registers, spills, shared memory, and if they fit.

    Exit 1 if one does not fit.
    """
    from service.engines.vllm.kernels import offline, tune

    if capability not in offline.SHARED_LIMIT:
        raise UserError(f"no limits known for capability {capability}; known: {sorted(offline.SHARED_LIMIT)}")
    fits = True
    for found in tune.resources(capability):
        fits &= found.fits
        typer.echo(
            f"{found.kernel:18s} {found.registers:4d} registers {found.spill_bytes:4d} B spilled "
            f"{found.shared_bytes / 1024:6.1f} KB shared  {found.warps} warps  {found.tensor_core:9s}"
            f"{'' if found.fits else '  DOES NOT FIT'}"
        )
    if not fits:
        raise typer.Exit(1)
