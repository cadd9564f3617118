"""`glm5 warm`: start a model once, so that later starts find what this one compiled."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.errors import UserError

if TYPE_CHECKING:
    from service.config import PoolConfig


def warm(
    file: Annotated[Path, typer.Argument(help="GGUF file (the first part of a split one).", show_default=False)],
    profile: Annotated[Path | None, typer.Option(help="Profile (YAML) that will serve it.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting. Repeatable.")
    ] = None,
) -> None:
    """Start FILE once as the profile says, judge it, end it, and say what each phase of the start took.

    Fills the caches that a start reads: config and tokenizer, vLLM's compiled model and memory plan, Triton's kernels.
    For images and for a new machine's volume. Needs the GPUs of a replica; pools are started one after the other.
    """
    from service.config import load

    config = load(profile, set_ or [])
    if not file.exists():
        raise UserError(f"{file} does not exist; give a GGUF file")
    name = config.model.model_copy(update={"path": str(file)}).served_name
    for pool_name, pool in config.pools.items():
        asyncio.run(_once(pool_name, pool, file, name, config.model.context_tokens))


async def _once(pool_name: str, pool: PoolConfig, file: Path, name: str, context_tokens: int) -> None:
    from rich.console import Console
    from rich.markup import escape

    from service.engines import registry
    from service.engines.phases import Phases
    from service.types import LoadProgress

    engine = registry.create(
        pool.engine.name,
        model=str(file),
        served_name=name,
        slots=pool.slots,
        context_tokens=context_tokens,
        options=pool.engine,
    )
    phases = Phases()
    with Console(stderr=True).status("starting") as status:

        def report(progress: LoadProgress) -> None:
            phases.say(progress)
            status.update(escape(f"{pool_name}: {progress.phase} {progress.detail}"))

        try:
            await engine.load(report)
            phases.say(LoadProgress("done"))
        finally:
            await engine.close()
    for phase, seconds in phases.past:
        typer.echo(f"{pool_name}: {phase} {seconds:.1f} s")
    typer.echo(f"{pool_name}: {pool.engine.name} started in {sum(seconds for _, seconds in phases.past):.1f} s")
