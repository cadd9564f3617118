"""Plans: memory, verdicts, best settings, profiles, the three refused short cuts, and the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from service import config
from service.errors import UserError
from service.planning import hardware, plots
from service.planning import plan as planner
from service.planning.cli import plan_app
from service.planning.memory import memory, split_fault
from service.planning.profile import profile_text
from service.planning.settings import EngineSettings
from service.planning.sources import model_shape
from service.planning.step_model import step_model
from service.planning.wrong_turns import active_weights_over_gpus, fewer_gpus, whole_file, wrong_turns


def make(hw: str = "8x-rtx-pro-6000", context: int = 8192, concurrency: int = 32, **settings: object) -> planner.Plan:
    chosen = EngineSettings(**({"slots": concurrency} | settings))  # type: ignore[arg-type]
    return planner.make(model_shape("glm-5"), hardware.box(hw), chosen, context=context, concurrency=concurrency)


def test_the_memory_table_adds_up():
    room = memory(model_shape("glm-5"), hardware.box("8x-rtx-pro-6000"), EngineSettings(slots=32), 8192, 32)
    assert room.used == pytest.approx(sum(r.bytes for r in room.rows))
    rows = {r.what: r.bytes for r in room.rows}
    assert rows["KV cache"] == 32 * 8192 * 78 * 576 * 2
    # 402 GiB over eight ranks, with what every rank holds whole, less the MTP layer and the indexer of dense MLA
    assert rows["weights"] / 1e9 == pytest.approx(54.5, abs=0.5)
    assert room.most_tokens * room.kv_per_token <= room.total - room.used + rows["KV cache"]


def test_too_much_context_does_not_fit_and_says_how_much_would():
    plan = make(context=32768, concurrency=64)
    assert not plan.fits
    fitting = plan.memory.most_tokens
    assert make(context=fitting // 64, concurrency=64).fits


def test_k_quants_stop_at_eight_ranks():
    shape = model_shape("glm-5")
    assert split_fault(shape, 8) is None
    fault = split_fault(shape, 16)
    assert fault is not None
    assert "2048 / 16 must be a multiple of 256" in fault


def test_whole_file_is_refused_by_name():
    refusal = whole_file(step_model("glm-5", "8x-rtx-pro-6000-reference"))
    # the reference operator reasoned 402 / 8 / 1792 = 28 ms (with GB for GiB); 4.4 GB take 2.5 ms
    assert refusal.claimed == pytest.approx(30.1, abs=0.1)
    assert refusal.true == pytest.approx(4.4 / 1.792, rel=0.01)
    assert "402 GiB is not read per step" in refusal.sentence
    assert "8 of 256 experts" in refusal.sentence


def test_active_weights_over_gpus_is_refused_by_name():
    refusal = active_weights_over_gpus(step_model("glm-5", "8x-rtx-pro-6000-reference"))
    assert refusal.claimed == pytest.approx(2.8, abs=0.05)
    assert refusal.true == pytest.approx(4.4, abs=0.05)
    assert "replicated projections are read whole by all 8 GPUs" in refusal.sentence
    assert "q_a" in refusal.sentence


def test_one_gpu_instead_of_two_has_no_all_reduces():
    refusal = fewer_gpus(step_model("glm-5", "2x-h200", tp=2))
    assert "the 157 all-reduces go" in refusal.sentence
    assert "among" not in refusal.sentence


def test_fewer_gpus_by_bandwidth_alone_is_refused_with_the_difference():
    model = step_model("glm-5", "8x-rtx-pro-6000-reference", kernels="plugin")
    refusal = fewer_gpus(model)
    half = replace(model, settings=replace(model.settings, tp=4))
    difference = half.split(1).total - model.split(1).total
    assert refusal.claimed == pytest.approx(2 * model.split(1).total * 1e3)
    assert refusal.true == pytest.approx(half.split(1).total * 1e3)
    assert refusal.true < 0.75 * refusal.claimed
    assert "TP=4: split weights double" in refusal.sentence
    assert "157 all-reduces stay" in refusal.sentence
    assert f"slower by {difference * 1e3:.1f} ms" in refusal.sentence
    assert "does not fit" in refusal.sentence


def test_split_weights_double_and_replicated_ones_do_not():
    shape = model_shape("glm-5")
    eight, four = (sum(shape.read_bytes(1, tp).values()) for tp in (8, 4))
    whole = sum(r.per_gpu for r in shape.roles(8) if not r.role.split)
    assert four - whole == pytest.approx(2 * (eight - whole), rel=1e-6)


def test_a_dense_model_on_a_cpu_has_nothing_to_refuse():
    assert wrong_turns(step_model("demo", "cpu-2core")) == []


def test_best_settings_beat_or_equal_those_given():
    given = make(kernels="plugin")
    for mode in given.modes:
        users = 1 if mode.aim == "latency" else 32
        assert mode.rate.tok_s >= 0.98 * planner.rate(given.model, users, 4096).tok_s
    latency = given.modes[0]
    assert latency.settings.graphs
    assert latency.settings.allreduce == "nccl-ll"
    assert any("CUDA graphs on" in reason for reason in latency.reasons)


def test_the_plainest_of_equals_wins():
    """On one GPU nothing is to be reduced, and a model without MTP drafts nothing."""
    shape = replace(model_shape("demo"))
    plan = planner.make(shape, hardware.box("1x-h200"), EngineSettings(tp=1, slots=8), context=2048, concurrency=8)
    for mode in plan.modes:
        assert mode.settings.draft_tokens == 0
        assert mode.settings.allreduce == "default"


def test_bottlenecks_move_as_in_the_reference_story():
    plan = make("8x-rtx-pro-6000-reference", concurrency=256, context=400, kernels="plugin")
    by_users = {r.concurrency: r.bottleneck for r in plan.rates}
    assert by_users[1] == "allreduce"  # 87 % of the operator's step
    assert by_users[64] == by_users[256] == "kernels"  # not memory, not PCIe


def test_error_bands_say_how_much_is_known():
    assert make(kernels="plugin").basis == "calibrated"
    assert make(kernels="hybrid").basis == "predicted"
    assert make("8x-h200").model.band == 0.5  # its link is assumed
    rate = make(kernels="hybrid").rates[0]
    assert rate.low < rate.tok_s < rate.high
    # drafts at large batches were never fitted
    drafted = make(kernels="hybrid", draft_tokens=3, concurrency=64, context=2048)
    assert drafted.rates[-1].high / drafted.rates[-1].tok_s == pytest.approx(1.4)


@pytest.mark.parametrize("hw", ["8x-rtx-pro-6000", "8x-h200", "cpu-2core"])
def test_the_profile_is_accepted_by_serve(hw: str, tmp_path: Path):
    path = tmp_path / "profile.yaml"
    arguments = [
        "demo" if hw == "cpu-2core" else "--shape=glm-5",
        "--hardware",
        hw,
        "-o",
        str(path),
        "--context",
        "2048",
    ]
    result = CliRunner().invoke(plan_app, arguments)
    assert result.exit_code == 0, result.output
    loaded = config.load(path)
    pool = loaded.pools["shared"]
    assert loaded.model.context_tokens == 2048
    assert pool.engine.name == ("llamacpp" if hw == "cpu-2core" else "vllm")
    assert pool.gpus == (0 if hw == "cpu-2core" else 8)


def test_two_boxes_get_two_pools(tmp_path: Path):
    path = tmp_path / "profile.yaml"
    result = CliRunner().invoke(plan_app, ["--shape=glm-5", "-o", str(path), "--context", "2048", "--boxes", "8"])
    assert result.exit_code == 0, result.output
    pools = config.load(path).pools
    assert (pools["latency"].max_replicas, pools["throughput"].max_replicas) == (2, 6)
    assert (pools["latency"].slots, pools["throughput"].slots) == (4, 32)
    assert pools["latency"].engine.mode == "interactivity"


def test_a_profile_says_what_it_rests_on():
    text = profile_text(make(), "x.gguf")
    assert "predicted" in text
    assert "NCCL_PROTO=LL" in text
    assert yaml.safe_load(text)["pools"]["shared"]["engine"]["tensor_parallel"] == 8


def test_json_and_exit_codes():
    runner = CliRunner()
    fits = runner.invoke(plan_app, ["--shape", "glm-5", "--json"])
    assert fits.exit_code == 0
    tree = json.loads(fits.stdout)
    assert tree["fits"]
    assert tree["model"]["read_bytes_per_gpu_token"] / 1e9 == pytest.approx(4.4, abs=0.05)
    for rate in tree["rates"]:
        total = sum(rate["step_ms"].values())
        assert rate["tok_s"] == pytest.approx(rate["concurrency"] / total * 1e3, rel=1e-3)
    assert {r["name"] for r in tree["refused"]} >= {"whole file", "active weights / GPUs"}
    assert runner.invoke(plan_app, ["--shape", "glm-5", "--context", "200000", "--concurrency", "64"]).exit_code == 1
    for bad in (
        [],
        ["--shape", "glm-6"],
        ["--shape", "glm-5", "--hardware", "9x"],
        ["--shape", "glm-5", "--kv", "fp4"],
    ):
        assert isinstance(runner.invoke(plan_app, bad).exception, UserError), bad
    assert "8x-rtx-pro-6000" in runner.invoke(plan_app, ["--list"]).stdout


def test_a_plot_is_drawn(tmp_path: Path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    plots.plot_plan(make(), path)
    assert path.read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(UserError, match="cannot write the plot"):
        plots.plot_plan(make(), tmp_path / "plan.nonsense")


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"glm5-serve\[plots\]"):
        plots.pyplot()
