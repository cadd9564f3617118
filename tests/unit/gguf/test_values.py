"""Numbers on which an engine would abort are refused by key, whatever their kind; those of real files are not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.errors import UserError
from service.gguf.header import read_header
from service.gguf.rules import Setup, verdicts
from service.gguf.values import _RULES, _Whole, value_faults
from tests.models import demo, gemma
from tests.unit.gguf.build import ARR, F32, F64, I32, U32, U64, File, Raw, Tensor, typed

GOOD: dict[str, Any] = {
    "block_count": 2, "context_length": 2048, "embedding_length": 64, "attention.head_count": 4,
    "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0,
}  # fmt: skip


def faults(place: Path, tensors: tuple[str, ...] = ("blk.0.attn_q.weight",), **changes: Any) -> list[str]:
    """Of a file with these values; a name's `__` is a dot."""
    values = GOOD | {name.replace("__", "."): value for name, value in changes.items()}
    keys: list[tuple[str, object]] = [("general.architecture", "llama")]
    keys += [(f"llama.{name}", value) for name, value in values.items() if value is not None]
    file = File(keys=keys, tensors=[Tensor(name, (64, 4)) for name in tensors])
    return value_faults(read_header(file.write(place / "a.gguf")))


DEADLY: list[tuple[str, Any]] = [
    ("attention.layer_norm_rms_epsilon", math.nan),
    ("attention.layer_norm_rms_epsilon", 0.0),
    ("attention.layer_norm_rms_epsilon", -1e-5),
    ("attention.layer_norm_rms_epsilon", math.inf),
    ("attention.layer_norm_rms_epsilon", 3),
    ("attention.layer_norm_epsilon", "small"),
    ("context_length", 0),
    ("context_length", 2**32 - 1),
    ("context_length", Raw(typed(2**40, U64))),
    ("context_length", 2048.0),
    ("context_length", True),
    ("attention.head_count", 0),
    ("attention.head_count", Raw(typed(-4, I32))),
    ("attention.head_count", [0, 0]),
    ("attention.head_count_kv", 0),
    ("attention.head_count_kv", 2**31),
    ("attention.key_length", 0),
    ("block_count", 0),
    ("block_count", 2**31),
    ("embedding_length", 0),
    ("vocab_size", 0),
    ("rope.freq_base", math.nan),
    ("rope.freq_base", 0.0),
    ("rope.scaling.factor", -2.0),
    ("attention.scale", math.nan),
    ("final_logit_softcapping", math.inf),
    ("expert_used_count", 9),
]


@pytest.mark.parametrize(("name", "value"), DEADLY)
def test_what_an_engine_dies_of_is_refused_by_key(tmp_path: Path, name: str, value: Any) -> None:
    found = faults(tmp_path, **{name: value})
    assert found and all(name in fault and "must be" in fault for fault in found)
    header = read_header(tmp_path / "a.gguf")
    told = [verdict for verdict in verdicts(header, Setup()) if verdict.rule == "values"]
    assert {verdict.level for verdict in told} == {"refuse"}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention__head_count": [4, 0, 4], "attention__head_count_kv": [2, 0, 2]},
        {"expert_count": 8, "expert_used_count": 2},
        {"expert_count": 0, "expert_used_count": 0},
        {"attention__layer_norm_rms_epsilon": Raw(typed(1e-6, F64))},
        {"context_length": 202752, "rope__dimension_count": 0, "attention__scale": 0.1},
        {"something__new": Raw(typed(-1, I32)), "attention__head_count": None},
    ],
)
def test_ordinary_values_pass(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert faults(tmp_path, **changes) == []


def test_a_model_without_attention_needs_no_heads(tmp_path: Path) -> None:
    assert faults(tmp_path, ("blk.0.ssm_in.weight",), attention__head_count=0) == []
    assert faults(tmp_path, attention__head_count=0) != []


@pytest.mark.parametrize("model", [demo, gemma])
def test_real_files_pass(model: Any) -> None:
    assert value_faults(read_header(model())) == []


numbers = st.one_of(
    st.integers(0, 2**32 - 1).map(lambda value: Raw(typed(value, U32))),
    st.integers(0, 2**64 - 1).map(lambda value: Raw(typed(value, U64))),
    st.integers(-(2**31), 2**31 - 1).map(lambda value: Raw(typed(value, I32))),
    st.floats(width=32).map(lambda value: Raw(typed(value, F32))),
    st.lists(st.integers(0, 2**32 - 1), max_size=4).map(lambda value: Raw(typed(value, ARR))),
)


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(name=st.sampled_from(sorted(_RULES)), value=numbers)
def test_any_number_is_in_its_range_or_refused_by_key(tmp_path: Path, name: str, value: Raw) -> None:
    rule = _RULES[name]
    found = faults(tmp_path, **({"expert_count": 8, "expert_used_count": 2} | {name: value}))
    try:
        said = read_header(tmp_path / "a.gguf").number(f"llama.{name}")
    except UserError:
        said = math.nan  # an array, or no number at all
    if isinstance(rule, _Whole):
        fits = rule.least <= said <= rule.most and said == said // 1 if math.isfinite(said) else False
    else:
        fits = rule.above < said < rule.below
    if not fits and isinstance(rule, _Whole) and not math.isfinite(said):
        return  # arrays have their own test
    if not fits:
        assert found and any(name in fault for fault in found)
