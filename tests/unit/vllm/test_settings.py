"""Config and attention of a file, the meter, arguments and versions for vLLM, errors and progress."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from service.engines.vllm import versions
from service.engines.vllm.attention import choose_attention, exactness
from service.engines.vllm.launch import Model, arguments, bind, variables
from service.engines.vllm.options import VllmOptions
from service.engines.vllm.versions import check_versions
from service.errors import UserError
from service.gguf.header import GgufHeader, read_header
from service.gguf.materialise import materialise
from tests.models import demo

pytest.importorskip("xllamacpp")
torch = pytest.importorskip("torch")


def test_materialised_directory(place: Path, mixed: GgufHeader) -> None:
    dense = materialise(mixed, place / "cache", "dense")
    assert materialise(mixed, place / "cache", "dense") == dense
    config = json.loads((dense / "config.json").read_text())
    assert config["model_type"] == "deepseek_v3"
    assert "index_topk" not in config
    assert (config["scoring_func"], config["topk_method"]) == ("sigmoid", "noaux_tc")
    assert (dense / mixed.path.name).resolve() == mixed.path.resolve()
    sparse = json.loads((materialise(mixed, place / "cache", "sparse") / "config.json").read_text())
    assert (sparse["model_type"], sparse["index_topk"], sparse["indexer_rope_interleave"]) == (
        "glm_moe_dsa",
        2048,
        True,
    )
    assert not list((place / "cache").glob(".making-*"))
    (place / "file").write_text("")
    with pytest.raises(UserError, match="cache directory"):
        materialise(mixed, place / "file" / "cache", "dense")


def test_config_of_another_architecture_comes_through_transformers(place: Path) -> None:
    pytest.importorskip("transformers")
    config = json.loads((materialise(read_header(demo()), place / "cache", "dense") / "config.json").read_text())
    wanted = {
        "model_type": "llama",
        "hidden_size": 576,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-5,
        "vocab_size": 49152,
    }
    assert wanted.items() <= config.items()
    assert config["tie_word_embeddings"] is True


def test_attention(mixed: GgufHeader) -> None:
    cases = [("auto", 2048, False, "dense"), ("auto", 4096, False, "sparse"), ("auto", None, False, "sparse")]
    cases += [("auto", 4096, True, "dense"), ("dense", 9999, False, "dense"), ("sparse", 64, False, "sparse")]
    for setting, context, on_cpu, wanted in cases:
        assert choose_attention(mixed, setting, context, on_cpu=on_cpu) == wanted  # type: ignore[arg-type]
    with pytest.raises(UserError, match="sparse attention needs a GPU"):
        choose_attention(mixed, "sparse", 64, on_cpu=True)
    assert choose_attention(read_header(demo()), "sparse", 64, on_cpu=True) == "dense"
    assert exactness(mixed, "dense", 2048) is None
    assert "exact up to 2048 tokens" in (exactness(mixed, "dense", 4096) or "")


def test_arguments() -> None:
    model = Model(Path("/m/a.gguf"), "glm", "glm-dsa", Path("/m"), 4096, 32)
    options = VllmOptions(tensor_parallel=8, mtp_tokens=3, mtp_schedule=((1, 8, 3), (9, 512, 0)), mode="interactivity")
    found = arguments(model, options, on_cpu=False)
    assert {"--tensor-parallel-size=8", "--max-num-seqs=32", "--performance-mode=interactivity"} <= set(found)
    assert {"--distributed-executor-backend=mp", "--tool-call-parser=glm47", "--reasoning-parser=glm45"} <= set(found)
    assert '--structured-outputs-config={"backend": "guidance"}' in found
    assert "--enforce-eager" not in found
    speculative = json.loads(next(a for a in found if a.startswith("--speculative-config=")).split("=", 1)[1])
    assert speculative["num_speculative_tokens_per_batch_size"] == [[1, 8, 3], [9, 512, 0]]
    assert speculative["model"] == "/m/a.gguf"
    plain = arguments(replace(model, architecture="llama"), VllmOptions(), on_cpu=True)
    latency = arguments(replace(model, slots=4), VllmOptions(mode="interactivity"), on_cpu=False)
    assert latency[latency.index("--cudagraph-capture-sizes") + 1 :][:8] == list("12345678")
    # Their own list wins; with drafts vLLM counts for itself.
    own = arguments(model, VllmOptions(graph_sizes=(16, 1)), on_cpu=False)
    assert own[own.index("--cudagraph-capture-sizes") + 1 :][:2] == ["1", "16"]
    assert "--cudagraph-capture-sizes" not in [*found, *plain]
    assert {"--enforce-eager", "--distributed-executor-backend=uni"} <= set(plain)
    assert not any("parser" in a or "speculative" in a or "gpu-memory" in a for a in plain)


def test_cores_are_shared_out() -> None:
    assert [bind("auto", ranks, cores) for ranks, cores in ((1, 2), (2, 2), (2, 8), (1, 1), (4, 2))] == [
        "0-1", "0|1", "0-3|4-7", "0", "nobind",
    ]  # fmt: skip
    assert bind("3-5", 2, 8) == "3-5"
    assert variables(VllmOptions(cpu_kv_gib=2), 2, Path("/p"))["VLLM_CPU_KVCACHE_SPACE"] == "2"


def test_settings_are_checked() -> None:
    for bad in (
        {"mtp_schedule": [[1, 2, 1]]},
        {"mtp_tokens": 1, "mtp_schedule": [[1, 2, 3]]},
        {"odd": 1},
        {"cpu_cores": "a"},
    ):
        with pytest.raises(ValidationError):
            VllmOptions(**bad)  # type: ignore[arg-type]


def test_versions() -> None:
    right = {"vllm": "0.32.0", "torch": "2.13.0+cpu", "vllm-gguf-plugin": "0.0.5"}
    check_versions(right, gguf=True, allow_other=False)
    check_versions({k: v for k, v in right.items() if k != "vllm-gguf-plugin"}, gguf=False, allow_other=False)
    check_versions({**right, "vllm": "0.29.0"}, gguf=True, allow_other=True)
    for change, words in [({"vllm": "0.29.0"}, "vllm 0.29.0 is installed"), ({"torch": "2.12.0"}, "torch 2.12.0")]:
        with pytest.raises(UserError, match=words):
            check_versions({**right, **change}, gguf=True, allow_other=False)
    with pytest.raises(UserError, match="vllm-gguf-plugin is not installed"):
        check_versions({"vllm": "0.32.0", "torch": "2.13.0"}, gguf=True, allow_other=False)


def test_the_plugins_kernels_are_needed_for_what_is_not_packed(mixed: GgufHeader) -> None:
    from gguf.constants import GGMLQuantizationType as T

    from service.engines.vllm.kernels.repack import FORM

    assert versions.plugin_computes(read_header(demo()), "packed", FORM) == []
    assert versions.plugin_computes(read_header(demo()), "plugin", FORM) == ["every quantised weight (kernels: plugin)"]
    # A file of packed types alone, one with another type in it, and one of another architecture with experts.
    packed = {n: t if t.type in (*FORM, T.F32) else replace(t, type=T.Q8_0) for n, t in mixed.tensors.items()}
    assert versions.plugin_computes(replace(mixed, tensors=packed), "packed", FORM) == []
    name = next(n for n, t in packed.items() if t.type == T.Q8_0)
    odd = packed | {name: replace(packed[name], type=T.IQ2_XXS)}
    assert versions.plugin_computes(replace(mixed, tensors=odd), "packed", FORM) == ["IQ2_XXS weights"]
    other = replace(mixed, tensors=packed, metadata={**mixed.metadata, "general.architecture": "qwen3moe"})
    assert versions.plugin_computes(other, "packed", FORM) == ["experts, where their activation is not SiLU"]


def test_layers_are_told_apart_by_whole_names() -> None:
    from service.engines.vllm.patches import FUSED, is_plain

    plain = ["model.layers.3.mlp.gate", "model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"]
    assert is_plain("model.layers.3.mlp.gate", plain, FUSED)
    assert is_plain(
        "language_model.model.layers.1.mlp.gate_up_proj", ["layers.1.mlp.gate_proj", "layers.1.mlp.up_proj"], FUSED
    )
    assert is_plain("model.layers.1.mlp.gate_up_proj", plain, FUSED)
    # What a comparison of substrings gets wrong.
    assert not is_plain("model.layers.3.mlp.gate_up_proj", plain, FUSED)
    assert not is_plain("model.layers.13.mlp.gate", plain, FUSED)
    with pytest.raises(ValueError, match=r"some of .* are quantised and some are not"):
        is_plain("model.layers.1.mlp.gate_up_proj", plain[:2], FUSED)


def test_vllms_errors_become_ours() -> None:
    from service.engines.vllm.layer import error_of
    from service.errors import BadRequest, ContextOverflow, EngineFailed, ModelNotFound

    overflow = "This model's maximum context length is 512 tokens."
    for error, kind in [
        ({"message": overflow, "code": 400, "param": "input_tokens"}, ContextOverflow),
        ({"message": "no", "code": 404}, ModelNotFound),
        ({"message": "bad", "code": 400, "param": "top_p"}, BadRequest),
        ({"message": "boom", "code": 500}, EngineFailed),
        ({}, EngineFailed),
    ]:
        found = error_of(error)
        assert type(found) is kind
        assert found.param == error.get("param") or kind in (EngineFailed,)


def test_directories_need_a_config(tmp_path: Path) -> None:
    from service.engines.vllm.engine import VllmEngine

    engine = VllmEngine(model=str(tmp_path), served_name="m", slots=1, context_tokens=64, options=VllmOptions())
    with pytest.raises(UserError, match=r"holds no config\.json"):
        engine._prepare(on_cpu=True)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    header, model = engine._prepare(on_cpu=True)
    assert header is None
    assert (model.architecture, model.config_dir) == ("llama", None)


@pytest.mark.parametrize(("timeout_s", "end"), [(3600.0, asyncio.CancelledError), (0.1, UserError)])
async def test_what_a_broken_off_load_has_started_is_ended_once_it_is_up(
    timeout_s: float, end: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    from service.engines.vllm import engine as module

    up, closed = threading.Event(), threading.Event()

    class Slow:
        @staticmethod
        def build(argv: list[str], books: object) -> Slow:
            up.wait(60)
            return Slow()

        def close(self) -> None:
            closed.set()

    async def on_cpu() -> bool:
        return True

    model = Model(Path("/m"), "m", "llama", None, 64, 1)
    monkeypatch.setattr(module, "Layer", Slow)
    monkeypatch.setattr(module, "_on_cpu", on_cpu)
    monkeypatch.setattr(module.launch, "variables", lambda options, cores, progress: {})
    monkeypatch.setattr(module.VllmEngine, "_prepare", lambda self, on_cpu: (None, model))
    options = VllmOptions(load_timeout_s=timeout_s)
    engine = module.VllmEngine(model="/m", served_name="m", slots=1, context_tokens=64, options=options)
    starting = asyncio.Event()
    loading = asyncio.create_task(engine.load(lambda told: starting.set() if told.phase == "starting vLLM" else None))
    await starting.wait()
    if end is asyncio.CancelledError:
        loading.cancel()
    with pytest.raises(end):
        await loading
    assert not closed.is_set()
    up.set()
    assert await asyncio.to_thread(closed.wait, 60)
