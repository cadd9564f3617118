"""gguf-py's reader with our way through arrays: the same fields as without."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from service.engines.vllm import arrays
from tests.models import demo


class Quick(gguf.GGUFReader):
    _get_field_parts = arrays.quickly(gguf.GGUFReader._get_field_parts)


def written(folder: Path, order: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE) -> Path:
    path = folder / "arrays.gguf"
    writer = gguf.GGUFWriter(path, "llama", endianess=order)
    writer.add_array("words", ["", "naïve", "🙂" * 9, "end"])
    writer.add_array("numbers", [1.5, -2.0, 3.25])
    writer.add_array("flags", [True, False])
    writer.add_string("one", "string")
    writer.add_tensor("t", np.arange(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def fields(reader: gguf.GGUFReader) -> dict[str, tuple[int, list[gguf.GGUFValueType], object]]:
    return {name: (field.offset, field.types, field.contents()) for name, field in reader.fields.items()}


@pytest.mark.parametrize("order", [gguf.GGUFEndian.LITTLE, gguf.GGUFEndian.BIG])
def test_the_same_fields_and_tensors(tmp_path: Path, order: gguf.GGUFEndian) -> None:
    path = written(tmp_path, order)
    ours, theirs = Quick(path), gguf.GGUFReader(path)
    assert fields(ours) == fields(theirs)
    assert [(t.name, t.data_offset) for t in ours.tensors] == [(t.name, t.data_offset) for t in theirs.tensors]
    assert ours.fields["words"].contents(2) == theirs.fields["words"].contents(2) == "🙂" * 9
    assert ours.fields["numbers"].contents(1) == theirs.fields["numbers"].contents(1) == -2.0


def test_a_real_vocabulary() -> None:
    assert fields(Quick(demo())) == fields(gguf.GGUFReader(demo()))
