"""`glm5 check`: what a GGUF file is, and whether vLLM would serve it rightly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from service.errors import UserError
from service.gguf.header import GgufHeader, read_header
from service.gguf.rules import Setup, Verdict, verdicts
from service.terminal import one_line

_COLOURS = {"ok": "green", "note": "yellow", "refuse": "red"}
MAX_NAME = 200


def check(
    file: Annotated[Path, typer.Argument(help="GGUF file (of a split one any part), or `demo` for the packaged one.")],
    tp: Annotated[int, typer.Option(help="GPUs that would share each layer.", min=1, max=64)] = 1,
    context: Annotated[int | None, typer.Option(help="Context of one request, tokens.", min=1)] = None,
    sequences: Annotated[int, typer.Option(help="Contexts held at once.", min=1)] = 1,
    gpu_gb: Annotated[float | None, typer.Option(help="Usable memory of one GPU, GB (10^9 bytes).", min=0.1)] = None,
    attention: Annotated[str, typer.Option(help="auto, dense or sparse (GLM-5).")] = "auto",
    mtp: Annotated[bool, typer.Option("--mtp/--no-mtp", help="Speculative decoding with the MTP block.")] = False,
    cpu: Annotated[bool, typer.Option("--cpu", help="Served by vLLM's CPU build (all weights dequantised).")] = False,
    make_reference: Annotated[
        Path | None,
        typer.Option(help="Load the file in vLLM here, on a setup that you trust, and write its answers to this file."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Of the reference's engine: bfloat16 as it will serve, float32 as the closest to truth.")
    ] = "bfloat16",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Judge a GGUF file from its header: one verdict per rule.

    Nothing is loaded (unless --make-reference is given), so it takes a second at any size.

    Exit code 0: can be served; 1: refused; 2: not a readable file or a bad option.

        glm5 check GLM-5-UD-Q4_K_XL-00001-of-00010.gguf --tp 8 --context 32768 --gpu-gb 96
    """
    if str(file) == "demo":
        from service.config import ModelConfig

        file = ModelConfig(path="demo").file()
    header = read_header(file)
    setup = _setup(header, tp, context, sequences, gpu_gb, attention, mtp, cpu)
    found = verdicts(header, setup)
    refused = any(verdict.level == "refuse" for verdict in found)
    if as_json:
        typer.echo(json.dumps(_tree(header, setup, found), indent=1))
    else:
        _print(header, setup, found)
    if refused:
        raise typer.Exit(1)
    if make_reference is not None:
        _make_reference(file, header, setup, make_reference, dtype, quiet=as_json)


def _setup(
    header: GgufHeader,
    tp: int,
    context: int | None,
    sequences: int,
    gpu_gb: float | None,
    attention: str,
    mtp: bool,
    cpu: bool,
) -> Setup:
    from service.engines.vllm.attention import choose_attention

    if attention not in ("auto", "dense", "sparse"):
        raise UserError(f"--attention {attention}: it is auto, dense or sparse")
    return Setup(
        tensor_parallel=tp,
        attention=choose_attention(header, attention, context, on_cpu=cpu),  # type: ignore[arg-type]
        mtp=mtp,
        quantised_kernels=not cpu,
        context_tokens=context,
        sequences=sequences,
        gpu_bytes=int(gpu_gb * 1e9) if gpu_gb is not None else None,
    )


def _tree(header: GgufHeader, setup: Setup, found: list[Verdict]) -> dict[str, Any]:
    return {
        "files": [str(file) for file in header.files],
        "name": header.name,
        "architecture": header.architecture,
        "bytes": header.bytes,
        "parameters": header.parameters,
        "tensors": len(header.tensors),
        "bytes_by_type": header.bytes_by_type,
        "identity": header.identity,
        "attention": setup.attention,
        "servable": all(verdict.level != "refuse" for verdict in found),
        "verdicts": [{"rule": v.rule, "level": v.level, "text": v.text} for v in found],
    }


def _print(header: GgufHeader, setup: Setup, found: list[Verdict]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    parts = f", {len(header.files)} files" if len(header.files) > 1 else ""
    name = escape(one_line(header.name[:MAX_NAME]))
    console.print(
        f"[bold]{name}[/]: {header.architecture}, {header.parameters / 1e9:.2f} B parameters, "
        f"{header.bytes / 1e9:.2f} GB{parts}; attention {setup.attention}, tensor parallel {setup.tensor_parallel}"
    )
    table = Table(box=None, pad_edge=False)
    for column in ("rule", "verdict", ""):
        table.add_column(column, overflow="fold")
    for verdict in found:
        colour = _COLOURS[verdict.level]
        table.add_row(verdict.rule, f"[{colour}]{verdict.level}[/]", escape(one_line(verdict.text)))
    console.print(table)


def _make_reference(file: Path, header: GgufHeader, setup: Setup, target: Path, dtype: str, *, quiet: bool) -> None:
    import asyncio

    from rich.console import Console

    from service.engines.vllm.canary import make_reference
    from service.engines.vllm.engine import VllmEngine
    from service.engines.vllm.options import VllmOptions
    from service.engines.vllm.versions import installed
    from service.types import LoadProgress

    console = Console(stderr=True, quiet=quiet)
    if dtype not in ("bfloat16", "float16", "float32"):
        raise UserError(f"--dtype {dtype}: it is bfloat16, float16 or float32")
    options = VllmOptions(
        tensor_parallel=setup.tensor_parallel,
        attention=setup.attention,
        mtp_tokens=1 if setup.mtp else 0,
        dtype=dtype,  # type: ignore[arg-type]
    )
    context = min(setup.context_tokens or 2048, 2048)
    engine = VllmEngine(model=str(file), served_name="reference", slots=8, context_tokens=context, options=options)

    async def work() -> None:
        with console.status("starting") as status:
            try:

                def report(progress: LoadProgress) -> None:
                    status.update(f"{progress.phase} {progress.detail}")

                await engine.load(report)
                status.update("asking")
                versions = ", ".join(f"{name} {number}" for name, number in sorted(installed().items()))
                made_with = f"{versions}; tensor parallel {setup.tensor_parallel}, {setup.attention}, {dtype}"
                reference = await make_reference(engine.layer, header, made_with)
            finally:
                await engine.close()
        target.write_text(reference.to_json(), encoding="utf-8")
        console.print(f"wrote {target}: {sum(len(p.steps) for p in reference.probes)} steps")

    asyncio.run(work())
