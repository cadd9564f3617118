"""Which tensor goes where in vLLM, and that its values arrive there."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as T

from service.gguf.header import GgufHeader, read_header
from service.gguf.plan import weights_plan
from tests.tiny_glm import make, make_split
from tests.tiny_glm.maker import weights
from tests.tiny_glm.vocabulary import vocabulary
from tests.unit.vllm.conftest import SMALL

pytest.importorskip("xllamacpp")
torch = pytest.importorskip("torch")


def forms(header: GgufHeader, part: str = "main", *, indexer: bool = False) -> dict[str, str]:
    plan = weights_plan(header, part, indexer=indexer, dequantise_all=False)  # type: ignore[arg-type]
    return {step.target: step.form for step in plan.steps}


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
