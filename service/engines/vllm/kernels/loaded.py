"""What the packed layers of a loaded model compute, as ahead.py wants to know it; and the call of it in a worker."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import Any

import torch

from service.engines.vllm.kernels import ops
from service.engines.vllm.kernels.ahead import Embedding, Experts, Linear, Model, compile_ahead

log = logging.getLogger("vllm.glm5")

PROCESSES = 16
"""Compilers of one rank at most."""


def products(
    modules: Iterable[Any], tokens: int, sequences: int
) -> tuple[tuple[Linear, ...], tuple[Embedding, ...], tuple[Experts, ...]]:
    """Each product once, of layers that quant_method packed. At most `tokens` of `sequences` are computed in a step."""
    linears, embeddings, experts = set(), set(), set()
    for layer in modules:
        for index, (form, n, k, _) in enumerate(getattr(layer, "glm5_parts", ())):
            # An output head computes one token a sequence; it is told by what it is made for, embeddings.
            embeds = hasattr(layer, "num_embeddings")
            most = min(tokens, sequences) if embeds else tokens
            if getattr(layer, f"glm5_copy_{index}") is not None:
                most = min(most, ops.COPY_FROM - 1)
            linears.add(Linear(form, n, k, most))
            if embeds:
                embeddings |= {Embedding(form, n, k, ids) for ids in ("int32", "int64")}
        if hasattr(layer, "glm5_w13"):
            (form13, _, hidden, _), (form2, _, inner, _) = layer.glm5_w13, layer.glm5_w2
            count, mapped = layer.glm5_w13_low.shape[0], layer.expert_map is not None
            top_k = layer.moe_config.experts_per_token
            experts.add(Experts(form13, form2, count, inner, hidden, top_k, mapped, tokens))
    in_order = (tuple(sorted(found, key=repr)) for found in (linears, embeddings, experts))
    return tuple(in_order)  # type: ignore[return-value]


def compile_for(worker: Any) -> None:
    """Compile what the models in vLLM's `worker` need, each rank its part; returns when all ranks are done."""
    from vllm.distributed import get_world_group

    runner, config = worker.model_runner, worker.vllm_config
    models = [runner.get_model()]
    for name in ("drafter", "speculator"):  # of vLLM's two model runners
        draft = getattr(getattr(runner, name, None), "model", None)
        models += [draft] if isinstance(draft, torch.nn.Module) else []
    scheduler = config.scheduler_config
    # One token for each sequence, and the drafted ones that are judged with it.
    sequences = scheduler.max_num_seqs * (1 + config.num_speculative_tokens)
    found = products(
        (layer for model in models for layer in model.modules()), scheduler.max_num_batched_tokens, sequences
    )
    group = get_world_group()
    if any(found):
        gpu = torch.cuda.get_device_properties(worker.device)
        dtype = str(config.model_config.dtype).removeprefix("torch.")
        model = Model(gpu.name, gpu.multi_processor_count, 10 * gpu.major + gpu.minor, dtype, *found)
        processes = max(1, min(PROCESSES, len(os.sched_getaffinity(0)) // group.world_size - 1))
        seconds = compile_ahead(model, group.rank_in_group, group.world_size, processes)
        log.info("glm5 kernels compiled ahead in %.1f s by %d processes", seconds, processes)
    group.barrier()
