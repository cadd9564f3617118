"""vLLM's settings as a profile writes them under `pools.<pool>.engine`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class VllmOptions(BaseModel):
    """vLLM: GPUs (or its CPU build), GGUF files or Hugging Face directories."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Literal["vllm"] = "vllm"
    tensor_parallel: int = Field(1, ge=1, le=64, description="GPUs that share each layer.")
    attention: Literal["auto", "dense", "sparse"] = Field(
        "auto",
        description="GLM-5's attention. dense is exact while a context is at most the indexer's top-k (2048 tokens). "
        "auto: dense where that holds and on CPUs, else sparse.",
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "bfloat16", description="Type of activations and of plain weights. float32 is for comparisons."
    )
    mode: Literal["balanced", "interactivity", "throughput"] = Field(
        "balanced", description="vLLM's performance mode: interactivity for a latency pool, throughput for the other."
    )
    cuda_graphs: bool = Field(True, description="Replay decode steps as CUDA graphs (ignored on CPUs).")
    graph_sizes: tuple[int, ...] = Field((), description="Batch sizes that get a graph. Empty: by mode and slots.")
    mtp_tokens: int = Field(0, ge=0, le=8, description="Tokens drafted a step by the model's MTP block. 0: off.")
    mtp_schedule: tuple[tuple[int, int, int], ...] = Field(
        (), description="Draft length by batch size: [first, last, tokens] each, first range from 1. Empty: mtp_tokens."
    )
    kernels: Literal["plugin", "packed"] = Field(
        "packed",
        description="Kernels for quantised weights on GPUs: ours on weights packed at load, or vllm-gguf-plugin's.",
    )
    bf16_copies: Literal["none", "lm_head", "all"] = Field(
        "none",
        description="With packed kernels: linears that also keep a bf16 copy for large batches (2 bytes a weight).",
    )
    batch_tokens: int = Field(
        0, ge=0, le=1_048_576, description="Tokens computed in one step at most. 0: vLLM chooses."
    )
    prefix_cache: bool = Field(True, description="Reuse the KV of prompts that begin alike.")
    kv_type: Literal["auto", "fp8"] = Field("auto", description="Type of the KV cache; auto: that of the activations.")
    gpu_memory_fraction: float = Field(0.9, gt=0, le=0.98, description="Share of a GPU's memory for weights and KV.")
    cpu_kv_gib: int = Field(1, ge=1, le=4096, description="KV cache on CPUs, GiB.")
    cpu_cores: str = Field(
        "auto",
        pattern=r"^(auto|nobind|[0-9,\-|]+)$",
        description="Cores on CPUs: `0-3`, one group for each rank split by `|`, or auto (all; shared out by rank).",
    )
    reasoning_parser: str = Field(
        "auto", max_length=64, description="vLLM's reasoning parser; auto: glm45 for GLM-5, else none; empty: none."
    )
    tool_parser: str = Field(
        "auto", max_length=64, description="vLLM's tool-call parser; auto: glm47 for GLM-5, else none; empty: none."
    )
    reference: str | None = Field(
        None,
        description="Reference file for the gate before ready (glm5 check --make-reference). Empty: structure only.",
    )
    gate: bool = Field(True, description="Judge the loaded model by its answers before it may serve.")
    allow_slow_kernels: bool = Field(
        False, description="Start though the GGUF plugin's CUDA kernels are not loaded (30 times slower)."
    )
    allow_other_versions: bool = Field(
        False, description="Start with other versions than those the cures are made for."
    )
    profiler: bool = Field(
        False, description="Let `glm5 explain --profile` look into decode steps (torch profiler, rank 0, on request)."
    )
    cache_dir: str = Field("~/.cache/glm5-serve", description="Where config and tokenizer made from headers are kept.")
    load_timeout_s: float = Field(
        3600.0, gt=0, le=86_400, description="Longest that loading may take, warm-up included, seconds."
    )
    extra_args: tuple[str, ...] = Field((), description="More arguments of `vllm serve`, as on its command line.")

    @model_validator(mode="after")
    def _consistent(self) -> VllmOptions:
        if self.mtp_schedule and not self.mtp_tokens:
            raise ValueError("mtp_schedule needs mtp_tokens (the longest draft)")
        if any(tokens > self.mtp_tokens for _, _, tokens in self.mtp_schedule):
            raise ValueError(f"mtp_schedule drafts more than mtp_tokens ({self.mtp_tokens})")
        return self
