"""Weights adapters for vllm-gguf-plugin: GLM-5, llama with its rotated rows, and any other where nothing is quantised.

The plugin asks each class `matches(config)` with the Hugging Face config and lets the first that does load the file.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gguf.constants import GGMLQuantizationType as T
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm_gguf_plugin.weights_adapter.base import BaseGGUFWeightsAdapter, GGUFLoadSpec
from vllm_gguf_plugin.weights_adapter.default import GGUFWeightsAdapter
from vllm_gguf_plugin.weights_adapter.gemma3 import Gemma3GGUFAdapter

from service.engines.vllm import platform
from service.engines.vllm.progress import journal
from service.engines.vllm.weights import Named, Progress, TensorFiles, dequantise, stream
from service.gguf.glm_dsa import ARCHITECTURE
from service.gguf.header import GgufHeader, read_header
from service.gguf.plan import WeightsPlan, weights_plan
from service.gguf.rules import Setup, refusals

if TYPE_CHECKING:
    from vllm.config import ModelConfig

log = logging.getLogger("vllm.glm5")
_LOG_EVERY_S, _WRITE_EVERY_S = 5.0, 0.5


class GlmDsaAdapter(BaseGGUFWeightsAdapter):  # type: ignore[misc]
    """GLM-5 from `glm-dsa` files, dense or sparse as config.json says; MTP's block from the same file."""

    _header: GgufHeader
    _plan: WeightsPlan
    load_spec: GGUFLoadSpec | None = None

    @classmethod
    def matches(cls, config: Any) -> bool:
        if config.model_type == "glm_moe_dsa":
            return True
        # In dense mode the config calls itself DeepSeek; no DeepSeek has keys of 192 + 64 and values of 256.
        deepseek = config.model_type in ("deepseek_v3", "deepseek_mtp")
        return deepseek and getattr(config, "qk_nope_head_dim", 0) == 192 and getattr(config, "v_head_dim", 0) == 256

    def prepare_loading(self, model_path: str, model_config: ModelConfig) -> GGUFLoadSpec:
        """Read and check the header; raises ValueError for a file that vLLM would load wrongly."""
        config, parallel = model_config.hf_config, get_current_vllm_config().parallel_config
        self._header = read_header(Path(model_path))
        sparse = hasattr(config, "index_topk")
        mtp = config.model_type == "deepseek_mtp"
        setup = Setup(
            tensor_parallel=parallel.tensor_parallel_size,
            expert_parallel=parallel.enable_expert_parallel,
            pipeline_parallel=parallel.pipeline_parallel_size,
            attention="sparse" if sparse else "dense",
            mtp=mtp,
            quantised_kernels=platform.quantised_kernels(),
        )
        faults = refusals(self._header, setup)
        if self._header.architecture != ARCHITECTURE:
            faults.append(f"{model_path} is a {self._header.architecture} file, not {ARCHITECTURE}")
        if faults:
            raise ValueError("this file cannot be served like this: " + "; ".join(faults))
        self._plan = weights_plan(
            self._header, "mtp" if mtp else "main", indexer=sparse, dequantise_all=not platform.quantised_kernels()
        )
        self.load_spec = GGUFLoadSpec(
            weights_source=[str(file) for file in self._header.files],
            unquantized_modules=sorted(self._plan.plain_modules),
        )
        return self.load_spec

    def prepare_weights(self, model_config: ModelConfig) -> Iterator[Named]:
        reporter = _Reporter(self._header.path.name)
        with TensorFiles(self._header) as files:
            yield from stream(files, self._plan.steps, self._plan.bytes, reporter)


class _Reporter:
    """Loading progress: in the log, and in the file that VllmEngine watches (from rank 0)."""

    def __init__(self, name: str) -> None:
        self._name, self._logged, self._written = name, 0.0, 0.0
        self._journal = journal(get_tensor_model_parallel_rank())

    def __call__(self, progress: Progress) -> None:
        last = progress.done == progress.total
        if progress.seconds - self._logged >= _LOG_EVERY_S or last:
            self._logged = progress.seconds
            log.info(
                "glm5 weights %s: %.2f of %.2f GB, %.2f GB/s, %.0f s left",
                self._name,
                progress.done / 1e9,
                progress.total / 1e9,
                progress.gb_per_s,
                progress.eta_s or 0.0,
            )
        if self._journal is not None and (progress.seconds - self._written >= _WRITE_EVERY_S or last):
            self._written = progress.seconds
            self._journal.weights(progress.done, progress.total, progress.seconds)


class _Plain:
    """Mixed into an adapter of the plugin where the platform has no kernels for quantised weights: dequantises."""

    def prepare_weights(self, model_config: ModelConfig) -> Iterator[Named]:
        yield from dequantised(super().prepare_weights(model_config))  # type: ignore[misc]


def dequantised(weights: Iterable[Named]) -> Iterator[Named]:
    """The plugin's stream of `qweight_type` and `qweight` as plain `weight`s."""
    kind = T.F32
    for name, weight in weights:
        if name.endswith("qweight_type"):
            kind = T(int(weight))
        elif name.endswith("qweight"):
            yield name.removesuffix("qweight") + "weight", dequantise(weight.contiguous().numpy(), kind)
        else:
            yield name, weight


class LlamaAdapter(GGUFWeightsAdapter):  # type: ignore[misc]
    """llama files hold query and key rows in ggml's order of rotary pairs; vLLM turns halves. The plugin leaves the
    rows as they are, which gives fluent nonsense. Rows are whole quantised blocks, so they can be put back as bytes."""

    @classmethod
    def matches(cls, config: Any) -> bool:
        return config.model_type in ("llama", "mistral")

    def prepare_loading(self, model_path: str, model_config: ModelConfig) -> GGUFLoadSpec:
        _refuse(model_path)
        return super().prepare_loading(model_path, model_config)

    def transform_weight(self, hf_name: str, weight: torch.Tensor) -> torch.Tensor:
        config = self.config.get_text_config()
        if hf_name.endswith((".q_proj.weight", ".q_proj.qweight")):
            return unpermute(weight, config.num_attention_heads)
        if hf_name.endswith((".k_proj.weight", ".k_proj.qweight")):
            return unpermute(weight, config.num_key_value_heads)
        return weight


def unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows (heads, half, 2) back to (heads, 2, half)."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def _refuse(model_path: str) -> None:
    parallel = get_current_vllm_config().parallel_config
    setup = Setup(
        tensor_parallel=parallel.tensor_parallel_size,
        expert_parallel=parallel.enable_expert_parallel,
        pipeline_parallel=parallel.pipeline_parallel_size,
        quantised_kernels=platform.quantised_kernels(),
    )
    faults = refusals(read_header(Path(model_path)), setup)
    if faults:
        raise ValueError("this file cannot be served like this: " + "; ".join(faults))


class _Checked:
    """Mixed into an adapter of the plugin: the same refusals for every architecture."""

    def prepare_loading(self, model_path: str, model_config: ModelConfig) -> GGUFLoadSpec | None:
        _refuse(model_path)
        spec: GGUFLoadSpec | None = super().prepare_loading(model_path, model_config)  # type: ignore[misc]
        return spec


class Gemma3Adapter(_Checked, Gemma3GGUFAdapter):  # type: ignore[misc]
    """Gemma 3, checked."""


class OtherAdapter(_Checked, GGUFWeightsAdapter):  # type: ignore[misc]
    """Any architecture that the plugin maps by itself, checked."""


class PlainLlamaAdapter(_Plain, LlamaAdapter):
    """llama, dequantised."""


class PlainGemma3Adapter(_Plain, Gemma3Adapter):
    """Gemma 3, dequantised."""


class PlainOtherAdapter(_Plain, OtherAdapter):
    """Any other architecture, dequantised."""


def adapters() -> list[type[BaseGGUFWeightsAdapter]]:
    """In the order in which they are asked."""
    if not platform.quantised_kernels():
        return [GlmDsaAdapter, PlainLlamaAdapter, PlainGemma3Adapter, PlainOtherAdapter]
    return [GlmDsaAdapter, LlamaAdapter, Gemma3Adapter, OtherAdapter]
