"""Verdicts on tiny GLM-5 files: good ones pass, each fault is refused by name; and `glm5 check` around them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from service.errors import UserError
from service.gguf.cli import check
from service.gguf.header import GgufHeader, read_header
from service.gguf.memory import per_gpu
from service.gguf.rules import Setup, refusals, verdicts
from service.gguf.split import cut, sizes_that_fit
from tests.models import demo
from tests.tiny_glm import MIXES, Tiny, make, make_split
from tests.unit.gguf.build import File, Raw, Tensor, typed
from tests.unit.gguf.test_fuzz import mutate

pytest.importorskip("xllamacpp")
SMALL = Tiny(layers=2, dense_layers=1, experts=3, experts_used=2)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def ud(place: Path) -> GgufHeader:
    return read_header(make(place / "ud.gguf", "ud", SMALL))


def levels(header: GgufHeader, setup: Setup) -> dict[str, str]:
    order = {"ok": 0, "note": 1, "refuse": 2}
    worst: dict[str, str] = {}
    for verdict in verdicts(header, setup):
        worst[verdict.rule] = max(worst.get(verdict.rule, "ok"), verdict.level, key=order.__getitem__)
    return worst


def test_a_good_file_passes(ud: GgufHeader) -> None:
    for setup in (
        Setup(),
        Setup(tensor_parallel=2, attention="sparse", mtp=True),
        Setup(quantised_kernels=False),
        Setup(context_tokens=2048, gpu_bytes=10**9),
    ):
        assert refusals(ud, setup) == []
    assert refusals(read_header(demo()), Setup(context_tokens=2048)) == []


@pytest.mark.parametrize("mix", sorted(set(MIXES) - {"mxfp4"}))
def test_each_mix_of_types_is_solved(place: Path, mix: str) -> None:
    header = read_header(make(place / f"{mix}.gguf", mix, SMALL))
    for setup in (Setup(), Setup(tensor_parallel=2, mtp=True, attention="sparse")):
        assert refusals(header, setup) == [], mix


def test_solutions_are_told(place: Path) -> None:
    def told(mix: str) -> str:
        header = read_header(make(place / f"told-{mix}.gguf", mix, SMALL))
        return " ".join(v.text for v in verdicts(header, Setup()) if v.rule == "types")

    assert "converted to Q8_0 while loading: blk.1.ffn_gate_exps.weight" in told("w1_over_w3")
    assert "since a fused partner is not quantised: blk.0.attn_kv_a_mqa.weight" in told("q_a_f16")


def test_a_type_without_kernels_is_refused(place: Path) -> None:
    header = read_header(make(place / "mxfp4.gguf", "mxfp4", SMALL))
    assert any("blk.1.ffn_gate_exps.weight: vLLM has no kernel for MXFP4" in text for text in refusals(header, Setup()))


def test_a_cut_inside_a_block_is_refused_with_what_fits(place: Path) -> None:
    small = Tiny(layers=2, dense_layers=1, experts=4, expert_ffn=256)
    header = read_header(make(place / "misaligned.gguf", "ud", small))
    found = refusals(header, Setup(tensor_parallel=2))
    assert any("ffn_down_exps.weight: 256 / 2 columns are not whole Q5_K blocks of 256" in text for text in found)
    assert all("(sizes that fit: 1)" in text for text in found)
    # Dequantised weights may be cut anywhere.
    assert refusals(header, Setup(tensor_parallel=2, quantised_kernels=False)) == []


def test_glm5_fits_8_gpus_and_no_more() -> None:
    """The real sizes, with the types of UD-Q4_K_XL: 2048 columns of the experts' down are 8 K-quant blocks."""
    header = glm5()
    assert refusals(header, Setup(tensor_parallel=8, attention="sparse", mtp=True)) == []
    assert sizes_that_fit(header, "sparse", quantised=True) == [1, 2, 4, 8]
    need = per_gpu(header, "sparse", True, 8, quantised=True)
    assert 45e9 < need.weights < 65e9
    assert need.kv_per_token == 79 * (576 * 2 + 132)


def glm5() -> GgufHeader:
    """GLM-5's header by size, without its 400 GB."""
    from types import MappingProxyType

    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    from service.gguf.glm_dsa import GlmDsa
    from service.gguf.header import TensorInfo

    keys = {
        "block_count": 79, "nextn_predict_layers": 1, "embedding_length": 6144, "attention.head_count": 64,
        "attention.head_count_kv": 1, "attention.q_lora_rank": 2048, "attention.kv_lora_rank": 512,
        "attention.key_length_mla": 256, "attention.value_length_mla": 256, "rope.dimension_count": 64,
        "leading_dense_block_count": 3, "feed_forward_length": 12288, "expert_count": 256, "expert_used_count": 8,
        "expert_feed_forward_length": 2048, "expert_shared_count": 1, "context_length": 202752,
        "attention.indexer.head_count": 32, "attention.indexer.key_length": 128, "attention.indexer.top_k": 2048,
        "attention.indexer.types": 1,
    }  # fmt: skip
    metadata: dict[str, object] = {f"glm-dsa.{key}": value for key, value in keys.items()}
    metadata |= {"general.architecture": "glm-dsa", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "glm4"}
    metadata["tokenizer.chat_template"] = "x"
    embedding = TensorInfo("token_embd.weight", (6144, 154880), GGMLQuantizationType.Q4_K, 0, 0, 1)

    def header(tensors: dict[str, TensorInfo]) -> GgufHeader:
        return GgufHeader((Path("glm5.gguf"),), (1,), 3, MappingProxyType(metadata), MappingProxyType(tensors), "0")

    tensors: dict[str, TensorInfo] = {}
    for name, shape, needed in GlmDsa.from_header(header({embedding.name: embedding})).tensors():
        if needed or name == "output.weight":
            block = int(name.split(".")[1]) if name.startswith("blk.") else 0
            plain = len(shape) == 1 or "gate_inp" in name
            kind = GGMLQuantizationType.F32 if plain else MIXES["ud"](name, block)
            values, size = GGML_QUANT_SIZES[kind]
            total = int(np.prod(shape)) // values * size
            tensors[name] = TensorInfo(name, shape, kind, 0, 0, total)
    return header(tensors)


def test_missing_unknown_and_misshapen_tensors_are_named(place: Path) -> None:
    lacking = make(place / "lacking.gguf", "q8_0", SMALL, blk__1__attn_q_b__weight=None, output_norm__weight=None)
    assert any(
        "2 tensors are missing: blk.1.attn_q_b.weight, output_norm.weight" in text
        for text in refusals(read_header(lacking), Setup())
    )
    more = make(place / "more.gguf", "q8_0", SMALL, blk__0__attn_q__weight=np.zeros((32, 256), np.float32))
    assert any("not known to glm-dsa: blk.0.attn_q.weight" in text for text in refusals(read_header(more), Setup()))
    bent = make(place / "bent.gguf", "q8_0", SMALL, blk__0__ffn_down__weight=np.zeros((256, 512), np.float32))
    assert any(
        "tensor blk.0.ffn_down.weight has shape [512, 256], the header's sizes say [1024, 256]" in text
        for text in refusals(read_header(bent), Setup())
    )
    half = make(place / "half.gguf", "q8_0", SMALL, blk__1__attn_v_b__weight=None)
    assert any("blk.1.attn_v_b.weight" in text for text in refusals(read_header(half), Setup()))


def test_what_is_not_used_is_named(ud: GgufHeader) -> None:
    notes = [v.text for v in verdicts(ud, Setup()) if v.rule == "unused"]
    assert any("indexer tensors" in text for text in notes)
    assert any("MTP is off" in text for text in notes)
    assert [v for v in verdicts(ud, Setup(attention="sparse", mtp=True)) if v.rule == "unused"] == []


def test_mtp_without_its_block_and_other_parallelism_are_refused(place: Path, ud: GgufHeader) -> None:
    bare = read_header(make(place / "bare.gguf", "q8_0", Tiny(layers=2, dense_layers=1, experts=4, mtp=0)))
    assert any("holds no MTP block" in text for text in refusals(bare, Setup(mtp=True)))
    assert any("expert parallel" in text for text in refusals(ud, Setup(expert_parallel=True)))
    assert any("pipeline parallel" in text for text in refusals(ud, Setup(pipeline_parallel=2)))


def test_memory_that_does_not_fit_is_refused_with_what_would(ud: GgufHeader) -> None:
    need = per_gpu(ud, "dense", False, 1, quantised=True)
    room = need.weights + 1000 * need.kv_per_token
    assert refusals(ud, Setup(context_tokens=1000, gpu_bytes=room)) == []
    (text,) = refusals(ud, Setup(context_tokens=1001, gpu_bytes=room))
    assert "hold 1000 tokens" in text


def test_exactness_of_dense_attention_is_said(ud: GgufHeader) -> None:
    def level(context: int) -> str:
        return next(v.level for v in verdicts(ud, Setup(context_tokens=context)) if "exact up to 2048" in v.text)

    assert (level(2048), level(2049)) == ("ok", "note")


def llama(**changes: object) -> File:
    keys: list[tuple[str, object]] = [
        ("general.architecture", "llama"), ("llama.block_count", 4), ("llama.attention.head_count", 4),
        ("llama.attention.head_count_kv", 2), ("llama.embedding_length", 64), ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "smollm"), ("tokenizer.chat_template", "x"),
    ]  # fmt: skip
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_down", "ffn_up", "ffn_gate")
    tensors = [Tensor("token_embd.weight", (64, 32)), Tensor("output_norm.weight", (64,))]
    tensors += [Tensor(f"blk.{b}.{name}.weight", (64, 64), 8) for b in range(4) for name in names]
    return File(keys=keys + list(changes.items()), tensors=tensors)


def test_other_architectures(tmp_path: Path) -> None:
    assert refusals(read_header(llama().write(tmp_path / "a.gguf")), Setup(tensor_parallel=2)) == []
    odd = llama()
    odd.keys[0] = ("general.architecture", "mamba9")
    assert any("no adapter" in text for text in refusals(read_header(odd.write(tmp_path / "b.gguf")), Setup()))
    short = llama()
    short.tensors = [t for t in short.tensors if t.name != "blk.2.attn_k.weight"]
    found = refusals(read_header(short.write(tmp_path / "c.gguf")), Setup())
    assert any("attn_k.weight is missing in block 2" in text for text in found)
    scaled = llama()
    scaled.tensors.append(Tensor("rope_freqs.weight", (8,)))
    assert any("rope_freqs.weight" in t for t in refusals(read_header(scaled.write(tmp_path / "d.gguf")), Setup()))
    mixtral = llama(**{"llama.expert_count": 8})
    assert any("Mixtral" in t for t in refusals(read_header(mixtral.write(tmp_path / "e.gguf")), Setup()))
    (text,) = refusals(read_header(llama().write(tmp_path / "f.gguf")), Setup(tensor_parallel=3))[:1]
    assert "4 attention heads do not divide" in text


def test_cuts() -> None:
    assert [cut(f"blk.0.{n}.weight") for n in ("attn_output", "ffn_up_exps", "attn_q_a", "ffn_gate_inp")] == [
        "columns", "rows", "whole", "whole",
    ]  # fmt: skip


def test_mutated_metadata_never_crashes_the_rules(place: Path, ud: GgufHeader) -> None:
    """Numbers of the header out of range, of the wrong kind, or gone: a verdict each time, never a traceback."""
    data = ud.path.read_bytes()
    first = min(tensor.offset for tensor in ud.tensors.values())
    # Only where the numbers stand: not in the vocabulary, which is most of the bytes.
    spans = [data.index(b"glm-dsa.block_count"), data.index(b"tokenizer.ggml.model")]
    rng = random.Random(7)
    path, refused, read = place / "mutant.gguf", 0, 0
    for _ in range(300):
        middle = mutate(data[spans[0] : spans[1]], rng)
        path.write_bytes(data[: spans[0]] + middle + data[spans[1] : first])
        with path.open("r+b") as stream:
            stream.truncate(len(data))
        try:
            header = read_header(path)
        except UserError:
            refused += 1
            continue
        read += 1
        for setup in (Setup(), Setup(tensor_parallel=2, attention="sparse", mtp=True, context_tokens=9, gpu_bytes=9)):
            verdicts(header, setup)
    assert refused > 50
    assert read > 20


app = typer.Typer()
app.command()(check)


def run(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(args))
    if isinstance(result.exception, UserError):
        return 2, str(result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_command(place: Path, ud: GgufHeader) -> None:
    code, out = run(str(ud.path), "--tp", "2", "--context", "4096")
    assert (code, "tiny GLM-5" in out) == (0, True)
    code, out = run(str(ud.path), "--tp", "4", "--json")
    tree = json.loads(out)
    assert (code, tree["servable"]) == (1, False)
    assert {"rule": "splits", "level": "refuse"}.items() <= next(
        v for v in tree["verdicts"] if v["level"] == "refuse"
    ).items()
    part = make_split(ud.path, 3)
    code, out = run(str(part), "--json")
    assert (code, len(json.loads(out)["files"])) == (0, 3)
    assert run(str(place / "no.gguf"))[0] == 2
    assert run(str(ud.path), "--attention", "odd") == (2, "--attention odd: it is auto, dense or sparse")
    assert run(str(ud.path), "--attention", "sparse", "--cpu")[0] == 2


def test_truncated_tensor_is_named(place: Path, ud: GgufHeader) -> None:
    data = ud.path.read_bytes()
    (place / "cut.gguf").write_bytes(data[:-100_000])
    code, words = run(str(place / "cut.gguf"))
    assert code == 2
    assert "truncated?" in words
    assert "tensor blk." in words


def test_per_layer_values_are_checked(tmp_path: Path) -> None:
    file = llama()
    file.keys[3] = ("llama.attention.head_count_kv", Raw(typed([1, 2])))
    text = " ".join(refusals(read_header(file.write(tmp_path / "a.gguf")), Setup(context_tokens=10)))
    assert "llama.attention.head_count_kv: should be" in text
