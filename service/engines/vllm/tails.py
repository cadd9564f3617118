"""Zero bytes behind raw GGUF weights, because the plugin's matrix kernels read past the end of a tensor.

mmq.cuh and moe.cuh of vllm-gguf-plugin 0.0.5 load a row's blocks several at a time without looking where it ends. A row
of, say, 576 weights (18 blocks of Q4_1, taken by eights) is left by 6 blocks: inside a tensor those are the next row's,
multiplied by zero tokens; behind the last row they are whatever lies there, and 0 times a scale that happens to be NaN
or infinite is NaN. Q2_K and Q3_K, taken by twos, multiply nothing beyond the end, but still read there, which may be no
memory at all. llama.cpp clears the bytes behind its tensors for the same reason. So do we.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import gguf
import torch

TAIL = 256
"""Bytes. Most that is left: 7 blocks of Q5_1 (168 bytes), 3 of Q8_0, 1 of Q3_K."""

Type = gguf.GGMLQuantizationType
STEP = {Type.Q4_0: 8, Type.Q4_1: 8, Type.Q5_0: 8, Type.Q5_1: 8, Type.Q8_0: 4, Type.Q2_K: 2, Type.Q3_K: 2}
"""Blocks loaded at once: 32 / qi of ggml-common.h. One for all other types."""


def overruns(weight: torch.Tensor, ggml_type: int) -> bool:
    """Whether the kernels leave the last row of `weight` (raw bytes, rows last but one)."""
    kind = Type(ggml_type)
    blocks = weight.shape[-1] // gguf.GGML_QUANT_SIZES[kind][1]
    return bool(blocks % STEP.get(kind, 1))


def tailed(weight: torch.Tensor) -> torch.Tensor:
    """The same bytes in a storage that ends with TAIL zero bytes; `weight` itself if it already is in one."""
    behind = weight.untyped_storage().nbytes() - weight.storage_offset() - weight.numel()
    if behind == TAIL and weight.is_contiguous():
        return weight
    whole = weight.new_zeros(weight.numel() + TAIL)
    inside = whole[: weight.numel()].view(weight.shape)
    return inside.copy_(weight)


def safe(weight: torch.Tensor, ggml_type: int) -> torch.Tensor:
    """What may be handed to the kernels in the place of `weight`."""
    return tailed(weight) if overruns(weight, ggml_type) else weight


def before_call(kernel: Any, weight_at: int, type_at: int) -> Any:
    """`kernel` with its raw weight made safe: at no cost for layers that `once_loaded` has seen, a copy at every call
    for a shard in the middle of mixed ones, whose neighbour's bytes mean something else."""

    @wraps(kernel)
    def call(*given: Any) -> Any:
        weight = safe(given[weight_at], int(given[type_at]))
        return kernel(*given[:weight_at], weight, *given[weight_at + 1 :])

    return call


def once_loaded(process: Any, names: tuple[str, ...]) -> Any:
    """`process` (process_weights_after_loading), then tails behind the raw parameters `names` that need one."""

    @wraps(process)
    def processed(self: Any, layer: torch.nn.Module) -> None:
        process(self, layer)
        for name in names:
            weight, kind = getattr(layer, name, None), getattr(layer, f"{name}_type", None)
            types = {*getattr(kind, "shard_weight_type", {}).values(), getattr(kind, "weight_type", None)} - {None}
            # Shards of different types are handed over one by one: only the last one ends where the tensor does.
            if weight is not None and weight.dtype == torch.uint8 and any(overruns(weight, int(t)) for t in types):
                weight.data = tailed(weight.data)

    return processed
