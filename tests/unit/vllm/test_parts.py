"""Pieces of the vLLM engine that need no vLLM: plan and data of weights, gate, meter, arguments, settings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import orjson
import pytest
from gguf import GGMLQuantizationType as T
from pydantic import ValidationError

from service.engines.vllm import canary
from service.engines.vllm.attention import choose_attention, exactness
from service.engines.vllm.canary import Probe, Reference, Step, Tolerance
from service.engines.vllm.launch import Model, arguments, bind, variables
from service.engines.vllm.meter import Meter
from service.engines.vllm.options import VllmOptions
from service.engines.vllm.versions import check_versions
from service.errors import UserError
from service.gguf.header import GgufHeader, read_header
from service.gguf.materialise import materialise
from service.gguf.plan import weights_plan
from tests.models import demo
from tests.tiny_glm import Tiny, make, make_split
from tests.tiny_glm.maker import weights
from tests.tiny_glm.vocabulary import vocabulary

pytest.importorskip("xllamacpp")
torch = pytest.importorskip("torch")
SMALL = Tiny(layers=2, dense_layers=1, experts=3, experts_used=2)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def mixed(place: Path) -> GgufHeader:
    return read_header(make(place / "mixed.gguf", "w1_over_w3", SMALL))


def forms(header: GgufHeader, part: str = "main", *, indexer: bool = False) -> dict[str, str]:
    plan = weights_plan(header, part, indexer=indexer, dequantise_all=False)  # type: ignore[arg-type]
    return {step.target: step.form for step in plan.steps}


# -- plan ------------------------------------------------------------------------------------------------------------


def test_each_tensor_has_one_place(mixed: GgufHeader) -> None:
    main, draft = forms(mixed, indexer=True), forms(mixed, "mtp", indexer=True)
    assert not set(main) & set(draft)
    # v_b travels with k_b: two tensors, one target.
    assert len(main) + len(draft) == len(mixed.tensors) - 3
    assert {name.split(".")[2] for name in draft} == {"2"}
    assert not any("indexer" in name for name in forms(mixed))


def test_forms(mixed: GgufHeader) -> None:
    found = forms(mixed, indexer=True)
    layer = "model.layers.1."
    assert found[layer + "mlp.experts.{}.gate_proj.weight"] == "q8_0"
    assert found[layer + "mlp.experts.{}.up_proj.weight"] == "q8_0"
    assert found[layer + "mlp.experts.{}.down_proj.weight"] == "quantised"
    assert found[layer + "self_attn.q_a_proj.weight"] == "quantised"
    for plain in ("kv_b_proj", "indexer.wk", "indexer.wq_b", "indexer.weights_proj"):
        assert found[f"{layer}self_attn.{plain}.weight"] == "dequantised"
    assert found[layer + "mlp.gate.weight"] == found[layer + "mlp.gate.e_score_correction_bias"] == "dequantised"


def test_plain_modules_are_whole_names(mixed: GgufHeader) -> None:
    plan = weights_plan(mixed, "main", indexer=False, dequantise_all=False)
    assert "model.layers.1.mlp.gate" in plan.plain_modules
    assert "model.layers.1.mlp.experts" not in plan.plain_modules
    assert "model.layers.0.mlp.gate_proj" not in plan.plain_modules


def test_groups(place: Path) -> None:
    q_a = forms(read_header(make(place / "q_a.gguf", "q_a_f16", SMALL)))
    assert q_a["model.layers.0.self_attn.q_a_proj.weight"] == "dequantised"
    assert q_a["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"] == "dequantised"
    plain = read_header(make(place / "plain.gguf", "experts_f16", SMALL))
    assert (
        "model.layers.1.mlp.experts" in weights_plan(plain, "main", indexer=False, dequantise_all=False).plain_modules
    )
    down = forms(read_header(make(place / "down.gguf", "down_f32", SMALL)))
    assert down["model.layers.1.mlp.experts.{}.down_proj.weight"] == "q8_0"
    assert down["model.layers.1.mlp.experts.{}.up_proj.weight"] == "quantised"


# -- data ------------------------------------------------------------------------------------------------------------


def loaded(header: GgufHeader, part: str = "main", *, everything: bool = True) -> dict[str, np.ndarray]:
    from service.engines.vllm.weights import Progress, TensorFiles, stream

    plan = weights_plan(header, part, indexer=True, dequantise_all=everything)  # type: ignore[arg-type]
    seen: list[Progress] = []
    with TensorFiles(header) as files:
        found = {name: tensor.clone() for name, tensor in stream(files, plan.steps, plan.bytes, seen.append)}
    assert seen[-1].done == seen[-1].total == plan.bytes
    assert [p.done for p in seen] == sorted(p.done for p in seen)
    return {
        name: tensor.float().numpy() if tensor.is_floating_point() else tensor.numpy() for name, tensor in found.items()
    }


@pytest.mark.parametrize("split", [False, True])
def test_values_arrive(place: Path, split: bool) -> None:
    path = make(place / f"plain-{split}.gguf", "f32", SMALL)
    header = read_header(make_split(path, 3) if split else path)
    found, right = loaded(header), weights(SMALL, vocabulary())
    np.testing.assert_array_equal(found["model.embed_tokens.weight"], right["token_embd.weight"])
    np.testing.assert_array_equal(found["model.layers.0.mlp.down_proj.weight"], right["blk.0.ffn_down.weight"])
    np.testing.assert_array_equal(
        found["model.layers.1.mlp.gate.e_score_correction_bias"], right["blk.1.exp_probs_b.bias"]
    )
    stack = right["blk.1.ffn_up_exps.weight"]
    np.testing.assert_array_equal(found["model.layers.1.mlp.experts.0.up_proj.weight"], stack)
    whole = found["model.layers.1.self_attn.kv_b_proj.weight"].reshape(SMALL.heads, -1, SMALL.kv_lora)
    np.testing.assert_array_equal(whole[:, : SMALL.nope], right["blk.1.attn_k_b.weight"].transpose(0, 2, 1))
    np.testing.assert_array_equal(whole[:, SMALL.nope :], right["blk.1.attn_v_b.weight"])
    draft = loaded(header, "mtp")
    np.testing.assert_array_equal(draft["model.layers.2.eh_proj.weight"], right["blk.2.nextn.eh_proj.weight"])
    np.testing.assert_array_equal(
        draft["model.layers.2.shared_head.norm.weight"], right["blk.2.nextn.shared_head_norm.weight"]
    )


def test_quantised_data_is_the_files_own(mixed: GgufHeader) -> None:
    found = loaded(mixed, everything=False)
    reader = {t.name: t for t in gguf.GGUFReader(mixed.path).tensors}
    name = "model.layers.1.mlp.experts.0.down_proj."
    np.testing.assert_array_equal(found[name + "qweight"], reader["blk.1.ffn_down_exps.weight"].data)
    assert found[name + "qweight_type"] == int(reader["blk.1.ffn_down_exps.weight"].tensor_type)


def test_w1_and_w3_become_one_type(mixed: GgufHeader) -> None:
    found = loaded(mixed, everything=False)
    reader = {t.name: t for t in gguf.GGUFReader(mixed.path).tensors}
    for part in ("gate", "up"):
        original = reader[f"blk.1.ffn_{part}_exps.weight"]
        right = gguf.quants.dequantize(original.data, original.tensor_type)
        assert found[f"model.layers.1.mlp.experts.0.{part}_proj.qweight_type"] == int(T.Q8_0)
        for expert in range(SMALL.experts):
            here = gguf.quants.dequantize(found[f"model.layers.1.mlp.experts.{expert}.{part}_proj.qweight"], T.Q8_0)
            blocks = np.abs(right[expert]).reshape(-1, 32).max(1)
            gaps = np.abs(here - right[expert]).reshape(-1, 32).max(1)
            # Half a step of 1/127, and the half-precision rounding of the scale.
            assert (gaps <= blocks * (0.5 / 127 + 2**-11)).all()


def test_q8_0_equals_gguf_pys() -> None:
    from service.engines.vllm.weights import to_q8_0

    values = np.random.default_rng(3).standard_normal((64, 960), np.float32)
    values[2] = 0
    # Exact halves of a step.
    values[3, :32] = np.arange(32) - 15.5
    values[3, 0] = 127
    np.testing.assert_array_equal(to_q8_0(torch.from_numpy(values)).numpy(), gguf.quants.quantize(values, T.Q8_0))


def test_a_file_that_changed_its_size_is_refused(place: Path) -> None:
    from service.engines.vllm.weights import TensorFiles

    path = make(place / "shrinks.gguf", "q8_0", SMALL)
    header = read_header(path)
    with path.open("r+b") as stream:
        stream.truncate(header.bytes - 4096)
    with pytest.raises(ValueError, match="changed its size"):
        TensorFiles(header)


# -- config and attention --------------------------------------------------------------------------------------------


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


# -- gate ------------------------------------------------------------------------------------------------------------


def probe(prompt: int, tokens: list[int], shift: float = 0.0) -> Probe:
    """Sound answers: distributions that differ by prompt and step."""
    steps = tuple(
        Step(t, tuple((t + i, -0.5 - 0.3 * i - 0.01 * ((t + prompt) % 7) + shift) for i in range(canary.TOP)))
        for t in tokens
    )
    return Probe((prompt,), steps)


SOUND = [probe(1, [5, 9, 3]), probe(2, [8, 2, 7]), probe(3, [4, 4, 6])]


def test_structure_of_sound_answers_passes() -> None:
    assert canary.structural_faults(SOUND, 100) == []


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([probe(p, [384] * 3) for p in (1, 2)], "token 384 is not in the vocabulary of 384"),
        ([probe(p, [7] * 3) for p in (1, 2)], "token 7 again and again"),
        ([Probe((p,), (Step(p, tuple((i, -5.0) for i in range(8))),)) for p in (1, 2)], "equally likely"),
        ([Probe((p,), (Step(p, ((3, -0.1), (4, -2.0))),)) for p in (1, 2)], "same for every prompt"),
        ([Probe((p,), (Step(p, ((p, 0.0), (4, -30.0))),)) for p in (1, 2)], "collapsed"),
        ([Probe((1,), (Step(1, ((1, float("nan")),)),))], "not numbers"),
    ],
)
def test_structure_of_garbage_is_caught(answers: list[Probe], words: str) -> None:
    assert any(words in fault for fault in canary.structural_faults(answers, 384)), words


def test_comparison_with_a_reference() -> None:
    reference = Reference("f", 100, "trusted", tuple(SOUND))
    tolerance = Tolerance(0.1, 0.5)
    assert canary.compare(reference, SOUND, tolerance) == []
    assert (
        canary.compare(reference, [probe(p.prompt[0], [s.token for s in p.steps], 0.05) for p in SOUND], tolerance)
        == []
    )
    shifted = [probe(p.prompt[0], [s.token for s in p.steps], 0.2) for p in SOUND]
    assert "on average" in canary.compare(reference, shifted, tolerance)[0]
    other = [replace(p, steps=(Step(60, tuple((60 + i, -0.5) for i in range(8))), *p.steps[1:])) for p in SOUND]
    assert canary.compare(reference, other, tolerance)
    # Where a token differs the rest of that answer is another text and says nothing.
    assert canary.differences(SOUND, [replace(p, steps=(*p.steps[:1], *p.steps[2:])) for p in SOUND])[2] < 9
    assert canary.compare(reference, SOUND[:2], tolerance) == ["the reference was made with other prompts"]


def test_batch_must_not_matter() -> None:
    alone = SOUND[0]
    allowed = Tolerance(0.02, 0.02)
    assert canary.batch_faults(alone, [alone] * 8, allowed) == []
    assert "alone and in a batch of 8" in canary.batch_faults(alone, [alone] * 7 + [probe(1, [5], 0.1)], allowed)[0]


def test_decoding_must_equal_reading() -> None:
    allowed = Tolerance(0.02, 0.02)
    assert canary.replay_faults(SOUND[0], SOUND[0], allowed) == []
    assert "CUDA graphs or the KV cache" in canary.replay_faults(SOUND[0], probe(1, [5, 9, 3], 0.1), allowed)[0]


def test_reference_survives_its_file_and_strangers_do_not() -> None:
    reference = Reference("f", 100, "trusted", tuple(SOUND))
    assert Reference.from_json(reference.to_json(), "x") == reference
    for text in ("", "{}", "[]", '{"format": 9}', reference.to_json().replace('"token": 5', '"token": "a"')):
        with pytest.raises(UserError, match="x is not a reference"):
            Reference.from_json(text, "x")


def test_the_reference_must_be_this_files(place: Path, mixed: GgufHeader) -> None:
    path = place / "reference.json"
    assert canary.read_reference(VllmOptions(), mixed) is None
    options = VllmOptions(reference=str(path))
    with pytest.raises(UserError, match="does not exist; make it with"):
        canary.read_reference(options, mixed)
    path.write_text(Reference("f", 100, "trusted", tuple(SOUND)).to_json())
    with pytest.raises(UserError, match="was made for another file"):
        canary.read_reference(options, mixed)
    path.write_text(Reference(canary.fingerprint(mixed), 100, "trusted", tuple(SOUND)).to_json())
    assert canary.read_reference(options, mixed) is not None


def test_fingerprint_sees_data_that_the_header_does_not(place: Path) -> None:
    first = read_header(make(place / "one.gguf", "q8_0", SMALL))
    second = read_header(make(place / "two.gguf", "q8_0", replace(SMALL, seed=1)))
    assert first.identity == second.identity
    assert canary.fingerprint(first) != canary.fingerprint(second)


# -- meter -----------------------------------------------------------------------------------------------------------


def chunk(tokens: int, index: int = 0, prompt: int = 4) -> bytes:
    usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
    return orjson.dumps({"choices": [{"index": index, "delta": {"content": "x"}}], "usage": usage})


def test_counts_are_differences_and_usage_stays_on_the_last_chunk() -> None:
    meter = Meter()
    chunks = [meter.read(chunk(0)), meter.read(chunk(3)), meter.read(chunk(3)), meter.read(chunk(4))]
    details = {"prompt_tokens_details": {"cached_tokens": 2}}
    last = meter.read(orjson.dumps({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 5, **details}}))
    assert [c.output_tokens for c in [*chunks, last]] == [0, 3, 0, 1, 1]
    assert [c.prompt_tokens for c in [*chunks, last]] == [4, 0, 0, 0, 0]
    assert last.cached_tokens == 2
    assert all(b"usage" not in c.data for c in chunks)
    assert b"usage" in last.data


def test_counts_of_several_choices() -> None:
    meter = Meter()
    counts = [meter.read(chunk(t, i)).output_tokens for i, t in [(0, 1), (1, 1), (0, 3), (1, 2)]]
    assert counts == [1, 1, 2, 1]


# -- arguments and settings ------------------------------------------------------------------------------------------


def test_arguments() -> None:
    model = Model(Path("/m/a.gguf"), "glm", "glm-dsa", Path("/m"), 4096, 32)
    options = VllmOptions(tensor_parallel=8, mtp_tokens=3, mtp_schedule=((1, 8, 3), (9, 512, 0)), mode="interactivity")
    found = arguments(model, options, on_cpu=False, progress=Path("/p"))
    assert {"--tensor-parallel-size=8", "--max-num-seqs=32", "--performance-mode=interactivity"} <= set(found)
    assert {"--distributed-executor-backend=mp", "--tool-call-parser=glm47", "--reasoning-parser=glm45"} <= set(found)
    assert "--enforce-eager" not in found
    speculative = json.loads(next(a for a in found if a.startswith("--speculative-config=")).split("=", 1)[1])
    assert speculative["num_speculative_tokens_per_batch_size"] == [[1, 8, 3], [9, 512, 0]]
    assert speculative["model"] == "/m/a.gguf"
    plain = arguments(replace(model, architecture="llama"), VllmOptions(), on_cpu=True, progress=Path("/p"))
    assert "--enforce-eager" in plain
    assert not any("parser" in a or "speculative" in a or "gpu-memory" in a for a in plain)


def test_cores_are_shared_out() -> None:
    assert [bind("auto", ranks, cores) for ranks, cores in ((1, 2), (2, 2), (2, 8), (1, 1), (4, 2))] == [
        "0-1", "0|1", "0-3|4-7", "0", "nobind",
    ]  # fmt: skip
    assert bind("3-5", 2, 8) == "3-5"
    assert variables(VllmOptions(cpu_kv_gib=2), 2)["VLLM_CPU_KVCACHE_SPACE"] == "2"


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
    right = {"vllm": "0.29.0", "torch": "2.13.0+cpu", "vllm-gguf-plugin": "0.0.5"}
    check_versions(right, gguf=True, allow_other=False)
    check_versions({k: v for k, v in right.items() if k != "vllm-gguf-plugin"}, gguf=False, allow_other=False)
    check_versions({**right, "vllm": "0.30.1"}, gguf=True, allow_other=True)
    for change, words in [({"vllm": "0.30.1"}, "vllm 0.30.1 is installed"), ({"torch": "2.12.0"}, "torch 2.12.0")]:
        with pytest.raises(UserError, match=words):
            check_versions({**right, **change}, gguf=True, allow_other=False)
    with pytest.raises(UserError, match="vllm-gguf-plugin is not installed"):
        check_versions({"vllm": "0.29.0", "torch": "2.13.0"}, gguf=True, allow_other=False)


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


def test_progress_of_the_loading_process_is_told(tmp_path: Path) -> None:
    from service.engines.vllm.engine import _progress

    path = tmp_path / "progress"
    assert _progress(path, 3).phase == "starting vLLM"
    path.write_text('{"done": 25, "total": 100, "seconds": 2.0}')
    found = _progress(path, 3)
    assert (found.phase, found.fraction, found.eta_s) == ("reading weights", 0.25, 6.0)
    path.write_text('{"done": 100, "total": 100, "seconds": 8.0}')
    assert _progress(path, 9).phase == "warming up"
    path.write_text("{half")
    assert _progress(path, 9).phase == "starting vLLM"


def test_directories_need_a_config(tmp_path: Path) -> None:
    from service.engines.vllm.engine import VllmEngine

    engine = VllmEngine(model=str(tmp_path), served_name="m", slots=1, context_tokens=64, options=VllmOptions())
    with pytest.raises(UserError, match=r"holds no config\.json"):
        engine._prepare(on_cpu=True)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    header, model = engine._prepare(on_cpu=True)
    assert header is None
    assert (model.architecture, model.config_dir) == ("llama", None)
