"""Slots the packed kernels into vLLM through vllm-gguf-plugin: its classes load raw bytes, ours repack and run them.

`register()` wraps GGUFConfig.get_quant_method, so it works with whatever patched that before; call it last. Settings
come from vLLM's `additional_config`: {"glm5": {"packed": true, "bf16_copies": "none" | "lm_head" | "all"}}.
What has no packed form (see repack.FORM) stays with the plugin's kernels; each such type is logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from itertools import groupby
from typing import Any

import torch

from service.engines.vllm.kernels import ops
from service.engines.vllm.kernels import reference as ref
from service.engines.vllm.kernels.linear import COUNTERS, dense
from service.engines.vllm.kernels.repack import FORM, Packed, repack, repack_shards

log = logging.getLogger(__name__)

_DONE = "_glm5_packed"
COPIES = ("none", "lm_head", "all")


@dataclass(frozen=True)
class Settings:
    """`bf16_copies`: linears (all, or the lm_head) that also keep a bf16 copy for cuBLAS, used from ops.COPY_FROM
    tokens on: faster at many users, 2 bytes a weight, and 2.3e-3 instead of 1.7e-3 from float64."""

    packed: bool = True
    bf16_copies: str = "none"


def current_settings() -> Settings:
    """From the vLLM config that is being built. Raises ValueError for a value that means nothing."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    extra = getattr(config, "additional_config", None)
    chosen = Settings(**extra.get("glm5", {})) if isinstance(extra, dict) else Settings()
    if chosen.bf16_copies not in COPIES:
        raise ValueError(f"additional_config.glm5.bf16_copies is {chosen.bf16_copies!r}; choose from {COPIES}")
    return chosen


def register() -> None:
    """Make vLLM use the packed kernels for GGUF layers. Idempotent; call after everything that patches GGUFConfig."""
    from vllm_gguf_plugin.quantization.config import GGUFConfig

    original = GGUFConfig.get_quant_method
    if getattr(original, _DONE, False):
        return
    ops.register()

    @wraps(original)
    def get_quant_method(self: Any, layer: Any, prefix: str) -> Any:
        method = original(self, layer, prefix)
        settings = current_settings()
        replacement = classes().get(type(method)) if settings.packed else None
        if replacement is None:
            return method
        made = replacement(self, layer.moe_config) if hasattr(method, "moe") else replacement(self)
        made.settings, made.prefix = settings, prefix
        return made

    setattr(get_quant_method, _DONE, True)
    GGUFConfig.get_quant_method = get_quant_method


@cache
def classes() -> dict[type, Callable[..., Any]]:
    """Plugin class -> our subclass. Made late: vLLM and the plugin are heavy."""
    from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method
    from vllm_gguf_plugin.quantization.fused_moe import GGUFMoEMethod
    from vllm_gguf_plugin.quantization.linear import GGUFLinearMethod
    from vllm_gguf_plugin.quantization.vocal_embeds import GGUFEmbeddingMethod

    @register_weight_loader_v2_supported_method
    class PackedLinearMethod(GGUFLinearMethod):  # type: ignore[misc]
        """Linear layers; merged shards of one form become one matrix, others one each, in the order of their ids."""

        settings, prefix = Settings(), ""

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            self._materialize_gguf_parameters(layer)
            shards = raw_shards(layer)
            if not packable([t for _, t in shards]):
                super().process_weights_after_loading(layer)
                return
            parts = [repack_shards(list(g)) for _, g in groupby(shards, key=lambda s: FORM[s[1]])]
            del shards
            forget(layer, "qweight", "qweight_type")
            copies = self.settings.bf16_copies
            wanted = copies == "all" or (copies == "lm_head" and self.prefix.rpartition(".")[2] == "lm_head")
            keep(layer, parts, self.params_dtype if wanted else None)

        def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            if not hasattr(layer, "glm5_parts"):
                return super().apply(layer, x, bias)
            flat = x.reshape(-1, x.shape[-1])
            outs = [
                torch.ops.glm5.packed_linear(
                    flat, *planes_of(layer, i), getattr(layer, f"glm5_copy_{i}"), layer.glm5_counters, *numbers
                )
                for i, numbers in enumerate(layer.glm5_parts)
            ]
            out = outs[0] if len(outs) == 1 else torch.cat(outs, 1)
            # view, not unflatten: that one refuses symbolic sizes
            out = out.view(*x.shape[:-1], out.shape[1])
            return out if bias is None else out + bias

    class PackedEmbeddingMethod(PackedLinearMethod, GGUFEmbeddingMethod):  # type: ignore[misc]
        """Embeddings and output heads, also one tied to the other: rows are decoded from the packed form."""

        def embedding(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(layer, "glm5_parts"):
                return super().embedding(layer, x)
            rows = torch.ops.glm5.packed_embed(
                x.flatten(), *planes_of(layer, 0), *layer.glm5_parts[0], self.params_dtype
            )
            return rows.view(*x.shape, rows.shape[1])

    class PackedMoEMethod(GGUFMoEMethod):  # type: ignore[misc]
        """Routed experts; w13 and w2 may differ in type. Expert parallelism: ids go through the layer's expert map."""

        settings, prefix = Settings(), ""

        def process_weights_after_loading(self, layer: Any) -> None:
            types = expert_types(layer)
            plain = layer.activation.value == "silu" and getattr(layer, "swiglu_limit", None) is None
            if not plain or not packable(types):
                if layer.use_ep:
                    raise ValueError(f"{self.prefix}: vllm-gguf-plugin's kernels ignore expert parallelism")
                super().process_weights_after_loading(layer)
                return
            for name, ggml_type in zip(("w13", "w2"), types, strict=True):
                packed = repack(getattr(layer, f"{name}_qweight").data, ggml_type, interleave=name == "w13")
                forget(layer, f"{name}_qweight", f"{name}_qweight_type")
                setattr(layer, f"glm5_{name}", packed_numbers(packed))
                for plane in ("low", "high", "scales"):
                    layer.register_buffer(f"glm5_{name}_{plane}", getattr(packed, plane), persistent=False)
            counters = torch.zeros(COUNTERS, dtype=torch.int32, device=layer.glm5_w13_low.device)
            layer.register_buffer("glm5_counters", counters, persistent=False)

        def apply(
            self,
            layer: Any,
            x: torch.Tensor,
            topk_weights: torch.Tensor,
            topk_ids: torch.Tensor,
            shared_experts: Any,
            shared_experts_input: torch.Tensor | None,
        ) -> torch.Tensor:
            if not hasattr(layer, "glm5_w13"):
                return super().apply(layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input)
            if layer.apply_router_weight_on_input:
                raise NotImplementedError("router weights on the input are not supported by the packed experts")
            form13, _, _, alpha13 = layer.glm5_w13
            form2, _, inner, alpha2 = layer.glm5_w2
            return torch.ops.glm5.packed_experts(
                x, layer.glm5_w13_low, layer.glm5_w13_high, layer.glm5_w13_scales, layer.glm5_w2_low,
                layer.glm5_w2_high, layer.glm5_w2_scales, topk_weights, topk_ids, layer.expert_map,
                layer.glm5_counters, form13, form2, inner, alpha13, alpha2,
            )  # fmt: skip

    return {
        GGUFLinearMethod: PackedLinearMethod,
        GGUFEmbeddingMethod: PackedEmbeddingMethod,
        GGUFMoEMethod: PackedMoEMethod,
    }


def raw_shards(layer: Any) -> list[tuple[torch.Tensor, int]]:
    """(raw bytes, GGML type) of a linear layer's shards in the order of their ids: never in that of the file."""
    from vllm_gguf_plugin.quantization.params import _gguf_ordered_shard_ids

    weight, kind = layer.qweight, layer.qweight_type
    if not weight.data_container:
        return [(weight.data, int(kind.weight_type))]
    return [
        (weight.data_container[weight.shard_id_map[i]], int(kind.shard_weight_type.get(i, kind.weight_type)))
        for i in _gguf_ordered_shard_ids(weight.shard_id)
    ]


def expert_types(layer: Any) -> list[int]:
    """GGML types of w13 and w2. Raises ValueError when gate and up differ: they share one stack of rows."""
    both = set(layer.w13_qweight_type.shard_weight_type.values()) or {layer.w13_qweight_type.weight_type}
    if len(both) > 1:
        raise ValueError(f"gate and up experts of one layer differ in type {sorted(both)}: make them one when loading")
    return [int(next(iter(both))), int(layer.w2_qweight_type.weight_type)]


def packable(types: list[int]) -> bool:
    missing = sorted({t for t in types if t not in FORM})
    for t in missing:
        _say_once(t)
    return not missing


@cache
def _say_once(ggml_type: int) -> None:
    name = ref.NAMES.get(ggml_type, f"GGML type {ggml_type}")
    log.warning("%s has no packed form: vllm-gguf-plugin's kernels run it", name)


def packed_numbers(w: Packed) -> tuple[int, int, int, float]:
    """What the ops take beside the planes: form, n, k, alpha."""
    return (w.form, w.n, w.k, w.alpha)


def keep(layer: torch.nn.Module, parts: list[Packed], copy: torch.dtype | None) -> None:
    """Hang the parts on the layer as buffers (not in its state dict), with dense copies of type `copy` if given."""
    layer.glm5_parts = [packed_numbers(w) for w in parts]
    for i, w in enumerate(parts):
        for plane in ("low", "high", "scales"):
            layer.register_buffer(f"glm5_{plane}_{i}", getattr(w, plane), persistent=False)
        layer.register_buffer(f"glm5_copy_{i}", dense(w, copy) if copy is not None else None, persistent=False)
    counters = torch.zeros(COUNTERS, dtype=torch.int32, device=parts[0].low.device)
    layer.register_buffer("glm5_counters", counters, persistent=False)


def planes_of(layer: torch.nn.Module, i: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(getattr(layer, f"glm5_{plane}_{i}") for plane in ("low", "high", "scales"))


def forget(layer: torch.nn.Module, *names: str) -> None:
    """Drop the raw parameters."""
    for name in names:
        getattr(getattr(layer, name), "data_container", []).clear()
        delattr(layer, name)
