"""Results of `vllm bench serve`: by request with our definitions, or its own summary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadtest import store, vllm_import
from service.errors import UserError

DATA = Path(__file__).parent / "data"


def detailed() -> dict[str, Any]:
    """Two streams, three requests each, 4 tokens: TTFT 0.5, gaps 0.1; the last fails. Written as 0.29 does."""
    starts = [100.0, 100.1, 100.8, 100.9, 101.6, 101.7]
    return {
        "date": "20261129-120000", "num_prompts": 6, "request_rate": "inf", "max_concurrency": 2,
        "duration": 2.6, "completed": 5, "failed": 1, "request_throughput": 5 / 2.6, "output_throughput": 20 / 2.6,
        "max_output_tokens_per_s": 9.0, "total_input_tokens": 50, "total_output_tokens": 20,
        "mean_ttft_ms": 500.0, "median_ttft_ms": 500.0, "p99_ttft_ms": 510.0, "std_ttft_ms": 0.0,
        "mean_itl_ms": 100.0, "median_itl_ms": 100.0, "p99_itl_ms": 100.0,
        "input_lens": [10] * 6, "output_lens": [4, 4, 4, 4, 4, 0], "ttfts": [0.5] * 5 + [0.0],
        "itls": [[0.1] * 3] * 5 + [[]], "start_times": starts, "errors": [""] * 5 + ["Internal Server Error"],
        "generated_texts": [""] * 6,
    }  # fmt: skip


def test_by_request() -> None:
    level, records = vllm_import.level(detailed(), 0, {"ttft": 1.0})
    m = level.measured
    assert level.source == "vllm bench serve, per request"
    assert {record.lane for record in records} == {0, 1}
    assert (m.sent, m.ok, m.failed) == (6, 5, 1)
    assert m.ttft and m.tpot and m.e2el and m.goodput
    assert m.ttft.mean == pytest.approx(0.5)
    assert m.tpot.mean == pytest.approx(0.1)
    assert m.e2el.mean == pytest.approx(0.8)
    assert m.window_s == pytest.approx(101.7 - 100.1)  # both streams active, until the one that failed ran dry
    assert m.goodput.share == pytest.approx(5 / 6)
    assert level.valid


def test_summary_only_and_back_from_disk(tmp_path: Path) -> None:
    raw = {k: v for k, v in detailed().items() if not isinstance(v, list)}
    level, records = vllm_import.level(raw, 0, {})
    assert records == []
    assert level.measured.output_tok_s == pytest.approx(20 / 2.6)
    assert level.measured.ttft and level.measured.itl is None and level.measured.icl
    assert level.measured.ttft.p99 == pytest.approx(0.51)
    assert level.measured.ttft.p95 != level.measured.ttft.p95  # not in the file: NaN, not a guess
    assert "whole run" in level.notes[0]
    store.add(store.create(tmp_path / "r", {"label": "v"}), level, records, 0.0)
    again = store.load(tmp_path / "r").levels[0]
    assert again.measured.ttft and again.measured.ttft.mean == level.measured.ttft.mean
    assert "- |" in (tmp_path / "r" / "table.md").read_text()


def test_two_files_of_one_load_are_repeats(tmp_path: Path) -> None:
    from tests.unit.loadtest.test_cli import load

    for name in "ab":
        (tmp_path / f"{name}.json").write_text(json.dumps(detailed()))
    done = load("import-vllm", tmp_path / "a.json", tmp_path / "b.json", "--out", tmp_path / "r", "--json")
    assert done.returncode == 0, done.stderr
    assert [(x["concurrency"], x["repeat"]) for x in json.loads(done.stdout)["levels"]] == [(2, 0), (2, 1)]


@pytest.mark.parametrize(
    ("text", "words"), [("{", "is not JSON"), ('{"duration": 1}', "lacks completed"), ("[]", "lacks")]
)
def test_bad_files(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError, match=words):
        vllm_import.read(tmp_path / "x.json")


def test_a_real_file() -> None:
    """vllm bench serve 0.29 at C=8 on the fake server: TTFT 0.26 s, 20 ms a token, 64 tokens, 4 tokens a chunk."""
    raw = vllm_import.read(DATA / "vllm-bench-serve-0.29.json")
    level, records = vllm_import.level(raw, 0, {})
    m, cycle = level.measured, 0.2 + 63 * 0.02
    assert {record.lane for record in records} == set(range(8))
    assert (m.ok, m.failed, level.concurrency) == (32, 0, 8)
    # Its streams run in step, so the last chunk of 7 of 8 comes microseconds after the window: 1.5 % of 4 rounds.
    assert m.output_tok_s == pytest.approx(8 * 64 / cycle, rel=0.03)
    assert m.request_s == pytest.approx(8 / cycle, rel=0.02)
    assert m.e2el and m.ttft and m.peak_tok_s
    assert m.e2el.mean == pytest.approx(cycle, rel=0.02)
    assert m.ttft.mean < 0.01  # what the tool records is the chunk that names the role
    assert raw["max_output_tokens_per_s"] < raw["output_throughput"]  # its peak counts chunks
    assert m.peak_tok_s >= m.output_tok_s
