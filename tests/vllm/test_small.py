"""Pieces that need vLLM imported, but no engine."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")


def test_rotary_rows_go_back_where_they_were() -> None:
    """As llama.cpp's converter permutes them, for float rows and for rows that are quantised blocks."""
    from service.engines.vllm.adapter import unpermute

    heads, half = 3, 4
    rows = torch.arange(heads * 2 * half * 5, dtype=torch.uint8).reshape(heads * 2 * half, 5)
    permuted = rows.reshape(heads, 2, half, 5).swapaxes(1, 2).reshape(rows.shape)
    assert not torch.equal(permuted, rows)
    assert torch.equal(unpermute(permuted, heads), rows)


def test_registering_twice_changes_nothing_more() -> None:
    from vllm_gguf_plugin import weights_adapter
    from vllm_gguf_plugin.quantization.config import GGUFConfig
    from vllm_gguf_plugin.quantization.params import _GGUFParamLoadMixin

    from service.engines.vllm.plugin import register

    register()
    registry, method = list(weights_adapter._ADAPTER_REGISTRY), GGUFConfig.get_quant_method
    load = _GGUFParamLoadMixin.load_merged_column_weight
    register()
    # The real plugin may come after ours.
    import vllm_gguf_plugin

    vllm_gguf_plugin.register()
    assert list(weights_adapter._ADAPTER_REGISTRY) == registry
    assert GGUFConfig.get_quant_method is method
    assert _GGUFParamLoadMixin.load_merged_column_weight is load
    assert registry[0].__name__ == "GlmDsaAdapter"


@pytest.mark.parametrize(("dtype", "wanted"), [("float32", "CPU_MLA"), ("float16", "CPU_MLA"), ("bfloat16", None)])
def test_amx_attention_gets_bf16_alone(dtype: str, wanted: str | None) -> None:
    from types import SimpleNamespace

    from vllm.platforms.cpu import CpuPlatform

    from service.engines.vllm.plugin import register

    class Rest(Exception):
        """vLLM's own part begins: it would need a whole configuration."""

    class Config:
        model_config = SimpleNamespace(use_mla=True, dtype=getattr(torch, dtype))
        attention_config = SimpleNamespace(backend=None)

        @property
        def cache_config(self) -> None:
            raise Rest

    register()
    with pytest.raises(Rest):
        CpuPlatform.check_and_update_config(Config())
    assert getattr(Config.attention_config.backend, "name", None) == wanted


def test_glm5_is_told_from_deepseek() -> None:
    from types import SimpleNamespace

    from service.engines.vllm.adapter import GlmDsaAdapter

    sizes = {"qk_nope_head_dim": 192, "v_head_dim": 256}
    for kind, dims, wanted in [
        ("glm_moe_dsa", {}, True),
        ("deepseek_v3", sizes, True),
        ("deepseek_mtp", sizes, True),
        ("deepseek_v3", {"qk_nope_head_dim": 128, "v_head_dim": 128}, False),
        ("llama", {}, False),
    ]:
        assert GlmDsaAdapter.matches(SimpleNamespace(model_type=kind, **dims)) is wanted


def test_a_plugin_that_does_not_sort_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_gguf_plugin.quantization import linear

    from service.engines.vllm import patches

    monkeypatch.setattr(linear, "_gguf_ordered_shard_ids", list)
    with pytest.raises(RuntimeError, match="joins fused shards in file order"):
        patches.apply()
