"""Known faults, put back on purpose. vLLM's processes read which ones from GLM5_TEST_FAULTS (names joined by commas).

Registered as a second plugin beside the real one (see `plugin_path`), so that the engine's own processes get it too.
`reference_kernels` is no fault: it lets quantised weights be computed with on CPUs, by dequantising at each use, which
is what makes the plugin's loading code reachable in CI.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIABLE = "GLM5_TEST_FAULTS"
NAMES = ("rank_missing", "shards_unsorted", "w1_w3_types", "no_checks", "rotary", "reference_kernels")


def plugin_path(place: Path, *, faults: bool) -> str:
    """Write package metadata with the entry point(s) to `place`; returns it for PYTHONPATH."""
    info = place / "glm5_under_test-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: glm5-under-test\nVersion: 0\n")
    points = ["glm5 = service.engines.vllm.plugin:register"]
    points += ["glm5_faults = tests.vllm.faults:register"] if faults else []
    (info / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", *points, ""]))
    return str(place)


def register() -> None:
    """The second plugin."""
    put(set(filter(None, os.environ.get(VARIABLE, "").split(","))))


def put(wanted: set[str]) -> Callable[[], None]:
    """Put these in force in this process, now; returns what takes them away again."""
    assert wanted <= set(NAMES), wanted
    from service.engines.vllm import adapter, patches, platform, plugin
    from service.gguf import plan

    changes = _Changes()
    if "shards_unsorted" in wanted:
        changes.set(patches, "_sorted_shards", lambda: None)
    if "reference_kernels" in wanted:
        changes.set(platform, "quantised_kernels", lambda: True)
    plugin.register()
    from vllm_gguf_plugin.quantization import linear
    from vllm_gguf_plugin.quantization.params import _GGUFParamLoadMixin

    if "reference_kernels" in wanted:
        _recure(changes)
        _reference_kernels(changes)
    if "rank_missing" in wanted:
        for name in ("load_merged_column_weight", "load_qkv_weight"):
            changes.set(_GGUFParamLoadMixin, name, _uncured(getattr(_GGUFParamLoadMixin, name), patches._DONE))
    if "rotary" in wanted:
        from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

        changes.set(RotaryEmbedding, "forward_cpu", _uncured(RotaryEmbedding.forward_cpu, patches._DONE))
    if "shards_unsorted" in wanted:
        # As if the file held the KV rows before the query rows, and up before gate.
        changes.set(linear, "_gguf_ordered_shard_ids", lambda ids: sorted(ids, reverse=True))
    if "w1_w3_types" in wanted:
        changes.set(plan._Forms, "_experts", lambda self, name: "quantised")
    if "no_checks" in wanted:
        changes.set(adapter, "refusals", lambda header, setup: [])
    return changes.undo


class _Changes:
    """Attributes set, with what they were."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        self._before.append((owner, name, owner.__dict__[name]))
        setattr(owner, name, value)

    def undo(self) -> None:
        for owner, name, value in reversed(self._before):
            setattr(owner, name, value)
        self._before.clear()


def _uncured(cured: Any, mark: str) -> Any:
    original = cured.__wrapped__

    def uncured(*given: Any, **named: Any) -> Any:
        return original(*given, **named)

    # So that the real plugin, should it come later, believes that it is cured.
    setattr(uncured, mark, True)
    return uncured


def _recure(changes: _Changes) -> None:
    """The real plugin may have run first, when this platform still had no kernels."""
    from vllm_gguf_plugin import weights_adapter
    from vllm_gguf_plugin.quantization.config import GGUFConfig

    from service.engines.vllm import patches
    from service.engines.vllm.adapter import GlmDsaAdapter

    current = GGUFConfig.get_quant_method
    changes.set(GGUFConfig, "get_quant_method", getattr(current, "__wrapped__", current))
    patches._exact_layer_names(plain_platform=False)
    changes.set(weights_adapter, "_ADAPTER_REGISTRY", [GlmDsaAdapter])


def _reference_kernels(changes: _Changes) -> None:
    """The plugin's operations, by gguf-py's dequantisation."""
    import gguf
    import torch
    from vllm_gguf_plugin import ops
    from vllm_gguf_plugin.quantization import fused_moe

    def plain(weight: Any, kind: int) -> Any:
        values = gguf.quants.dequantize(weight.contiguous().numpy(), gguf.GGMLQuantizationType(int(kind)))
        return torch.from_numpy(values)

    def dequantize(weight: Any, kind: int, rows: int, columns: int, dtype: Any) -> Any:
        return plain(weight, kind).reshape(rows, columns).to(dtype)

    def matmul(weight: Any, x: Any, kind: int, rows: int) -> Any:
        return (x.float() @ plain(weight, kind).T).to(x.dtype)

    def experts(x: Any, weight: Any, ids: Any, top_k: int, kind: int, rows: int, tokens: int) -> Any:
        chosen = ids.flatten().tolist()
        held = {expert: plain(weight[expert], kind) for expert in set(chosen)}
        return torch.stack([x[row // top_k].float() @ held[expert].T for row, expert in enumerate(chosen)]).to(x.dtype)

    def moe_sum(values: Any, out: Any) -> None:
        out.copy_(values.sum(1))

    # More than 64 tokens would take a path that sorts them by expert with a CUDA operation.
    changes.set(fused_moe, "MMQ_QUANT_TYPES", frozenset())
    kernels = {"ggml_dequantize": dequantize, "ggml_mul_mat_a8": matmul, "ggml_mul_mat_vec_a8": matmul}
    for name, kernel in (kernels | {"ggml_moe_a8_vec": experts, "moe_sum": moe_sum}).items():
        changes.set(ops, name, kernel)
