"""From our settings to vLLM's: the arguments of `vllm serve`, and the variables that its CPU build reads. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from service.engines.vllm.options import VllmOptions
from service.engines.vllm.progress import VARIABLE
from service.gguf.glm_dsa import ARCHITECTURE
from service.planning.settings import capture_sizes


@dataclass(frozen=True, slots=True)
class Model:
    """What is to be served. `path`: a GGUF file (then `config_dir` holds its config and tokenizer) or a directory."""

    path: Path
    served_name: str
    architecture: str
    config_dir: Path | None
    context_tokens: int
    slots: int


PROFILED_STEPS = 64
"""A trace holds thousands of events a step and is written while requests wait."""


def arguments(model: Model, options: VllmOptions, *, on_cpu: bool, traces: Path | None = None) -> list[str]:
    """Arguments for vLLM's own parser. `traces`: folder for the profiler's, where it is on. What decides the
    computation is the same at every start of the same profile: vLLM finds what it compiled by a hash of it."""
    args = [
        f"--model={model.path}",
        f"--served-model-name={model.served_name}",
        f"--max-model-len={model.context_tokens}",
        f"--max-num-seqs={model.slots}",
        f"--tensor-parallel-size={options.tensor_parallel}",
        f"--dtype={options.dtype}",
        f"--performance-mode={options.mode}",
        # Not Ray's: one replica is one process tree, which ends with it. A single rank computes in the engine's own
        # process: one process less that imports vLLM, and no hand-over at each step.
        f"--distributed-executor-backend={'mp' if options.tensor_parallel > 1 else 'uni'}",
        # What a request leaves out is OpenAI's default, not the file's.
        "--generation-config=vllm",
        "--enable-prompt-tokens-details",
        # vLLM's first choice, xgrammar, drops keywords without a word (docs/decisions.md).
        f"--structured-outputs-config={json.dumps({'backend': 'guidance'})}",
        f"--additional-config={json.dumps(_ours(options))}",
        "--enable-prefix-caching" if options.prefix_cache else "--no-enable-prefix-caching",
    ]
    if model.config_dir is not None:
        args += [f"--hf-config-path={model.config_dir}", f"--tokenizer={model.config_dir}"]
    if on_cpu or not options.cuda_graphs:
        args.append("--enforce-eager")
    elif sizes := graph_sizes(options, model.slots):
        args += ["--cudagraph-capture-sizes", *map(str, sizes)]
    if not on_cpu:
        args.append(f"--gpu-memory-utilization={options.gpu_memory_fraction}")
    if options.batch_tokens:
        args.append(f"--max-num-batched-tokens={options.batch_tokens}")
    if options.kv_type != "auto":
        args.append(f"--kv-cache-dtype={options.kv_type}")
    if options.mtp_tokens:
        args.append(f"--speculative-config={json.dumps(_speculative(model, options))}")
    glm5 = model.architecture in (ARCHITECTURE, "glm_moe_dsa")
    reasoning = ("glm45" if glm5 else "") if options.reasoning_parser == "auto" else options.reasoning_parser
    tools = ("glm47" if glm5 else "") if options.tool_parser == "auto" else options.tool_parser
    if reasoning:
        args.append(f"--reasoning-parser={reasoning}")
    if tools:
        args += [f"--tool-call-parser={tools}", "--enable-auto-tool-choice"]
    if traces is not None:
        window = {
            "profiler": "torch",
            "torch_profiler_dir": str(traces),
            "torch_profiler_with_stack": False,
            "torch_profiler_dump_cuda_time_total": False,
            "ignore_frontend": True,
            "max_iterations": PROFILED_STEPS,
        }
        args.append(f"--profiler-config={json.dumps(window)}")
    return [*args, *options.extra_args]


def graph_sizes(options: VllmOptions, slots: int) -> tuple[int, ...]:
    """Batch sizes to capture; none: as vLLM chooses (with drafts it counts in tokens, and knows best)."""
    if options.graph_sizes or options.mtp_tokens:
        return tuple(sorted(options.graph_sizes))
    return capture_sizes(options.mode == "interactivity", slots, options.mtp_tokens)


def _ours(options: VllmOptions) -> dict[str, object]:
    """What our own code in vLLM's processes reads."""
    kernels = {"packed": options.kernels == "packed", "bf16_copies": options.bf16_copies}
    return {"glm5": kernels}


def _speculative(model: Model, options: VllmOptions) -> dict[str, object]:
    found: dict[str, object] = {"method": "mtp", "num_speculative_tokens": options.mtp_tokens}
    if model.config_dir is not None:
        # The draft comes from the same file; vLLM finds its config beside the path that it is given.
        found |= {"model": str(model.path), "quantization": "gguf"}
    if options.mtp_schedule:
        found["num_speculative_tokens_per_batch_size"] = [list(entry) for entry in options.mtp_schedule]
    return found


def variables(options: VllmOptions, cores: int, progress: Path) -> dict[str, str]:
    """Environment of vLLM's processes. vLLM reads some settings from there alone; all are set, none is left to luck.
    `progress`: file in which the loading process reports."""
    return {
        VARIABLE: str(progress),
        # What a start measured of the GPU's memory serves the next one, where as much memory is free.
        "VLLM_ENABLE_STARTUP_PLAN": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(options.cpu_kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": bind(options.cpu_cores, options.tensor_parallel, cores),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(int(options.load_timeout_s)),
    }


def bind(setting: str, ranks: int, cores: int) -> str:
    """Cores for each rank. vLLM's own `auto` leaves a second rank without cores on a small machine."""
    if setting != "auto":
        return setting
    if ranks > cores:
        return "nobind"
    share = cores // ranks
    groups = [range(rank * share, (rank + 1) * share) for rank in range(ranks)]
    return "|".join(f"{group[0]}-{group[-1]}" if len(group) > 1 else str(group[0]) for group in groups)
