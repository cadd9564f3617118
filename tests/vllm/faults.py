"""Known faults, put back on purpose. vLLM's processes read which ones from GLM5_TEST_FAULTS (names joined by commas).

Registered as a second plugin beside the real one (see `plugin_path`), so that the engine's own processes get it too.
`reference_kernels` is no fault: it lets quantised weights be computed with on CPUs, by dequantising at each use, which
is what makes the plugin's loading code reachable in CI.
"""

from __future__ import annotations

import os
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
    from service.engines.vllm import patches, platform, plugin

    wanted = set(filter(None, os.environ.get(VARIABLE, "").split(",")))
    assert wanted <= set(NAMES), wanted
    if "shards_unsorted" in wanted:
        patches._sorted_shards = lambda: None
    if "rotary" in wanted:
        patches._strided_rotary = lambda: None
    if "reference_kernels" in wanted:
        platform.quantised_kernels = lambda: True
    plugin.register()
    if "reference_kernels" in wanted:
        _recure(patches)
        _reference_kernels()
    if "rank_missing" in wanted:
        from vllm_gguf_plugin.quantization.params import _GGUFParamLoadMixin as Mixin

        for name in ("load_merged_column_weight", "load_qkv_weight"):
            _put_back(Mixin, name, patches)
    if "shards_unsorted" in wanted:
        from vllm_gguf_plugin.quantization import linear

        # As if the file held the KV rows before the query rows, and up before gate.
        linear._gguf_ordered_shard_ids = lambda ids: sorted(ids, reverse=True)
    if "w1_w3_types" in wanted:
        from service.gguf import plan

        plan._Forms._experts = lambda self, name: "quantised"
    if "no_checks" in wanted:
        from service.engines.vllm import adapter

        adapter.refusals = lambda header, setup: []


def _put_back(owner: Any, name: str, patches: Any) -> None:
    original = getattr(owner, name).__wrapped__

    def uncured(*given: Any, **named: Any) -> Any:
        return original(*given, **named)

    setattr(uncured, patches._DONE, True)
    setattr(owner, name, uncured)


def _recure(patches: Any) -> None:
    """The real plugin may have run first, when this platform still had no kernels."""
    from vllm_gguf_plugin import weights_adapter
    from vllm_gguf_plugin.quantization.config import GGUFConfig

    from service.engines.vllm.adapter import GlmDsaAdapter

    current = GGUFConfig.get_quant_method
    GGUFConfig.get_quant_method = getattr(current, "__wrapped__", current)
    patches._exact_layer_names(plain_platform=False)
    weights_adapter._ADAPTER_REGISTRY[:] = [GlmDsaAdapter]


def _reference_kernels() -> None:
    """The plugin's operations, by gguf-py's dequantisation."""
    import gguf
    import torch
    from vllm_gguf_plugin import ops

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

    ops.ggml_dequantize, ops.moe_sum = dequantize, moe_sum
    ops.ggml_mul_mat_a8 = ops.ggml_mul_mat_vec_a8 = matmul
    ops.ggml_moe_a8_vec = experts
