"""vLLM's settings as a profile writes them under `pools.<pool>.engine`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class VllmOptions(BaseModel):
    """vLLM: GPUs (or its CPU build)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Literal["vllm"] = "vllm"
    tensor_parallel: int = Field(1, ge=1, le=64, description="GPUs that share each layer.")
