"""What has to lie in one GPU's memory, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass

from service.planning.hardware import Box
from service.planning.settings import EngineSettings
from service.planning.shape import ModelShape
from service.planning.tensors import TYPE_BLOCKS, role_of

# What vLLM holds beside weights and KV: CUDA context and NCCL buffers, activations of a prefill chunk, captured graphs.
# Assumed, from vLLM's own start-up reports at this size of model; a CPU process needs far less.
RUNTIME_BYTES = 1.5e9
ACTIVATION_BYTES = 1.5e9
GRAPH_BYTES = 1.5e9
CPU_RUNTIME_BYTES = 0.3e9


@dataclass(frozen=True, slots=True)
class MemoryRow:
    what: str
    bytes: float
    why: str


@dataclass(frozen=True, slots=True)
class Memory:
    """One GPU's memory. `tokens`: context tokens of all requests together that were asked for."""

    rows: tuple[MemoryRow, ...]
    total: float
    tokens: int
    kv_per_token: float

    @property
    def used(self) -> float:
        return sum(r.bytes for r in self.rows)

    @property
    def free(self) -> float:
        return self.total - self.used

    @property
    def fits(self) -> bool:
        return self.free >= 0

    @property
    def most_tokens(self) -> int:
        """Context tokens that would fit together with everything else."""
        return max(0, int((self.free + self.tokens * self.kv_per_token) / self.kv_per_token))


def memory(shape: ModelShape, box: Box, settings: EngineSettings, context: int, concurrency: int) -> Memory:
    """The table for `concurrency` requests of `context` tokens each."""
    mtp = settings.draft_tokens > 0
    cpu = box.gpu.is_cpu
    weights = shape.weight_bytes_per_gpu(settings.tp, mtp=mtp, attention=settings.attention, runtime=settings.runtime)
    kv = shape.kv_bytes_per_token(settings.tp, settings.kv_value_bytes, settings.attention)
    running = min(concurrency, settings.slots)
    tokens = running * context
    held = "held whole by every rank (MLA)" if shape.mla else f"split over {min(settings.tp, shape.kv_heads)} ranks"
    rows = [
        MemoryRow(
            "weights", weights, f"{shape.quantisation}, TP={settings.tp}" + (", with the MTP layer" if mtp else "")
        ),
        MemoryRow("KV cache", tokens * kv, f"{running} x {context} tokens, {kv / 1e3:.1f} kB each, {held}"),
        MemoryRow("runtime", CPU_RUNTIME_BYTES if cpu else RUNTIME_BYTES, "process, context, link buffers (assumed)"),
    ]
    if not cpu:
        rows.append(MemoryRow("activations", ACTIVATION_BYTES, f"prefill chunk of {settings.prefill_chunk} (assumed)"))
        if settings.graphs:
            rows.append(MemoryRow("CUDA graphs", GRAPH_BYTES, f"{len(settings.capture_sizes)} sizes (assumed)"))
    return Memory(tuple(rows), box.gpu.memory, tokens, kv)


def split_fault(shape: ModelShape, tp: int) -> str | None:
    """Why TP=`tp` cannot be: rows whose columns do not split on whole quantisation blocks (loads silently, answers
    garbage), or heads that do not divide. None if it can."""
    for tensor in shape.tensors:
        role = role_of(tensor.name)
        block = TYPE_BLOCKS[tensor.type][0]
        row_parallel = role.name == "o" or "_down" in tensor.name
        if not role.split or not row_parallel or role.dequantised or block == 1:
            continue
        columns = tensor.shape[0]
        if columns % tp or (columns // tp) % block:
            return (
                f"TP={tp} cuts rows of {tensor.name} ({columns} columns, {tensor.type}) inside a block of {block}: "
                f"{columns} / {tp} must be a multiple of {block}"
            )
    return None
