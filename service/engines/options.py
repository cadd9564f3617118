"""Engine settings as a profile writes them under `pools.<pool>.engine`. vLLM's stand in vllm/options.py."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class LlamaCppOptions(BaseModel):
    """llama.cpp in process: any GGUF file, on CPUs (or on GPUs where xllamacpp was built for them)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Literal["llamacpp"] = "llamacpp"
    threads: int = Field(0, ge=0, le=1024, description="Threads that compute. 0: one for each physical core.")
    batch_tokens: int = Field(
        512, ge=32, le=16384, description="Prompt tokens computed at once; a cancel waits for one such batch."
    )
    prefix_cache: bool = Field(
        True, description="Reuse the KV of a slot's previous prompt when the next one starts alike."
    )
    prefix_cache_mib: int = Field(256, ge=0, description="Memory for KV of prompts that left their slot, MiB. 0: none.")
    gpu_layers: int = Field(0, ge=0, le=1000, description="Layers put on a GPU (only with a GPU build of xllamacpp).")


class SimulatedOptions(BaseModel):
    """Tokens on a clock: no model, the time of a step comes from the step model or from two numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Literal["simulated"] = "simulated"
    hardware: str | None = Field(None, description="Catalogue name (glm5 plan --list). Empty: the two numbers below.")
    shape: str = Field("glm-5", description="Model shape for the step model: a built-in name or a GGUF file.")
    mtp: bool = Field(False, description="Model multi-token prediction (speculative decoding) in the step time.")
    cuda_graphs: bool = Field(True, description="Model CUDA graphs (else eager launches) in the step time.")
    step_ms: float = Field(20.0, gt=0, description="Milliseconds for one decode step with one running request.")
    step_ms_per_request: float = Field(
        0.0, ge=0, description="Milliseconds added to the step by each further running request."
    )
    prefill_tokens_per_s: float = Field(20000.0, gt=0, description="Prompt tokens a second.")
    load_s: float = Field(0.0, ge=0, description="Seconds that loading takes.")
    breaks_after: int = Field(
        0, ge=0, description="Requests after which this engine fails every further one, to rehearse that. 0: never."
    )
    vocab_size: int = Field(154880, ge=256, description="Vocabulary size that is reported.")
