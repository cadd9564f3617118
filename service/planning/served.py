"""The step model of a pool as it is served: planning's settings from the engine's options in a profile. Pure."""

from __future__ import annotations

from typing import Any

from service.config import ModelConfig, PoolConfig
from service.engines.options import LlamaCppOptions, SimulatedOptions
from service.engines.vllm.options import VllmOptions
from service.errors import UserError
from service.planning import calibration as calibrations
from service.planning.hardware import Box
from service.planning.hardware import box as find_box
from service.planning.settings import EngineSettings, capture_sizes
from service.planning.shape import Attention, ModelShape
from service.planning.sources import model_shape
from service.planning.step_model import MTP_DRAFTS, StepModel
from service.scaling.conversion import Mode

Options = LlamaCppOptions | SimulatedOptions | VllmOptions


def engine_settings(
    options: Options, shape: ModelShape, box: Box, *, slots: int, context_tokens: int
) -> EngineSettings:
    """How an engine with these options decodes `shape` on `box`. `slots`: requests at once; `context_tokens`: longest
    request, which chooses the attention. Raises UserError where the step model knows not this engine on this box, or
    drafts are asked of a model that has no layer for them."""
    settings = EngineSettings(**_chosen(options, shape, box, slots, context_tokens), slots=slots)
    if settings.draft_tokens and not shape.mtp_layers:
        raise UserError(f"{shape.name} has no MTP layer: it cannot draft {settings.draft_tokens} tokens a step")
    return settings


def pool_model(model: ModelConfig, pool: PoolConfig, hardware: str) -> StepModel:
    """The step model of one replica of `pool` on `hardware`, a box of the catalogue or a preflight JSON. Raises
    UserError."""
    file = "" if pool.engine.name == "simulated" else str(model.file())
    return served_model(pool.engine, file, hardware, slots=pool.slots, context_tokens=model.context_tokens)


def usual_options(options: Options, mode: Mode, shape: ModelShape) -> Options:
    """The engine's options with what a mode usually changes (docs/modes.md): drafts, where `shape` has a layer for
    them, and every small graph size for latency; neither for throughput."""
    drafts = mode == "latency" and shape.mtp_layers > 0
    if isinstance(options, SimulatedOptions):
        return options.model_copy(update={"mtp": drafts})
    if isinstance(options, VllmOptions):
        usual: dict[str, Any] = {
            "mode": "interactivity" if mode == "latency" else "throughput",
            "mtp_tokens": MTP_DRAFTS if drafts else 0,
            "mtp_schedule": (),
        }
        return options.model_copy(update=usual)
    return options


def served_model(options: Options, file: str, hardware: str, *, slots: int, context_tokens: int) -> StepModel:
    """The step model of a pool with these options. `file`: the GGUF file that it serves (the simulated engine names its
    own shape); `hardware`: a box of the catalogue or a preflight JSON. Raises UserError."""
    shape = model_shape(options.shape if isinstance(options, SimulatedOptions) else file)
    box = find_box(hardware)
    settings = engine_settings(options, shape, box, slots=slots, context_tokens=context_tokens)
    return StepModel(shape, box, settings, calibrations.choose(shape, box, settings))


def _chosen(options: Options, shape: ModelShape, box: Box, slots: int, context_tokens: int) -> dict[str, Any]:
    """Fields of EngineSettings that these options decide."""
    cpu: dict[str, Any] = {"runtime": "llamacpp", "kernels": "llamacpp"}
    if isinstance(options, SimulatedOptions):
        # As its own clock reads them (simulated.make_clock).
        asked = {"graphs": options.cuda_graphs, "draft_tokens": MTP_DRAFTS if options.mtp else 0}
        return {"tp": box.gpus} | (cpu if box.gpu.is_cpu else {}) | asked
    if isinstance(options, LlamaCppOptions):
        if not box.gpu.is_cpu:
            raise UserError(f"{box.name} has GPUs, and the step model knows llamacpp on CPUs only")
        return cpu | {"tp": 1, "graphs": False, "prefill_chunk": options.batch_tokens}
    if box.gpu.is_cpu:
        raise UserError(f"{box.name} has no GPUs, and the step model knows vllm on GPUs only")
    sizes = capture_sizes(options.mode == "interactivity", slots, options.mtp_tokens)
    kv_bytes = 1.0 if options.kv_type == "fp8" else 4.0 if options.dtype == "float32" else 2.0
    return {
        "tp": options.tensor_parallel,
        "kernels": "hybrid" if options.kernels == "packed" else "plugin",
        "graphs": options.cuda_graphs,
        "capture_sizes": tuple(sorted(options.graph_sizes)) or sizes,
        "attention": _attention(options, shape, context_tokens),
        "kv_value_bytes": kv_bytes,
        "draft_tokens": options.mtp_tokens,
        "draft_schedule": options.mtp_schedule,
    } | ({"prefill_chunk": options.batch_tokens} if options.batch_tokens else {})


def _attention(options: VllmOptions, shape: ModelShape, context_tokens: int) -> Attention:
    """As the engine chooses on GPUs (service/engines/vllm/attention.py): dense where that is exact."""
    if not shape.index_top_k:
        return "dense"
    if options.attention != "auto":
        return options.attention
    return "dense" if context_tokens <= shape.index_top_k else "sparse"
