from __future__ import annotations

import pytest

from loadtest import sweep
from loadtest.counters import Reading, judge, parse, read
from loadtest.plan import Level, Workload
from loadtest.wire import Target
from tests.fake_openai import FakeServer, Script
from tests.unit.loadtest.rig import Silent, run

OURS = 'glm_output_tokens_total{pool="a",le="x y"} 10\nglm_output_tokens_total{pool="b"} 5\nglm_prompt_tokens_total 7\n'


@pytest.mark.parametrize(
    ("page", "reading"),
    [
        (OURS, Reading("glm5-serve", 15, 7)),
        (OURS.replace("glm_", "ray_glm_"), Reading("glm5-serve", 15, 7)),
        ('# TYPE x counter\nvllm:generation_tokens_total{engine="0"} 3.0e2\n', Reading("vllm", 300, 0)),
        ("llamacpp:tokens_predicted_total 8\nllamacpp:prompt_tokens_total 9\n", Reading("llama.cpp", 8, 9)),
        ("process_cpu_seconds_total 4\n", None),
        ("", None),
    ],
)
def test_three_dialects(page: str, reading: Reading | None) -> None:
    assert parse(page) == reading


@pytest.mark.parametrize(
    ("client", "made", "status"), [(1000, 1000, "agree"), (1000, 1005, "agree"), (1000, 1006, "disagree"),
                                   (1006, 1000, "disagree"), (0, 0, "agree"), (5, -3, "disagree")],
)  # fmt: skip
def test_half_a_percent(client: int, made: int, status: str) -> None:
    assert judge(Reading("vllm", 50, 0), Reading("vllm", 50 + made, 0), client).status == status


def test_no_counters_is_said_not_held_against_the_run() -> None:
    check = judge("http://x answers 404", Reading("vllm", 1, 1), 5)
    assert (check.status, check.detail) == ("unavailable", "http://x answers 404")
    assert "answers 404" in read("http://127.0.0.1:9/metrics") or "refused" in str(read("http://127.0.0.1:9/metrics"))


@pytest.mark.parametrize(("dialect", "name"), [("vllm", "vllm"), ("llamacpp", "llama.cpp")])
def test_against_a_live_page(fake: FakeServer, dialect: str, name: str) -> None:
    ran = run(fake, Script(dialect=dialect), Level(0, 2, requests=6, timeout_s=10))
    assert ran.summary.crosscheck is not None
    assert (ran.summary.crosscheck.status, ran.summary.crosscheck.dialect) == ("agree", name)
    assert ran.summary.crosscheck.server_tokens == fake.counters()["output_tokens"]


def test_counters_that_are_published_late(fake: FakeServer) -> None:
    """The server shows what it counted 0.6 s ago: requests before the level must not be counted into it."""
    fake.play(Script(counter_delay_s=0.6))
    settings = sweep.Settings(Target.parse(fake.url), Workload(model="fake", output_tokens=50, words=60))
    level = Level(0, 1, requests=2, warmup=0, timeout_s=10)
    sweep.run_level(settings, level, Silent())  # its 100 tokens are not yet shown when the next level begins
    outcome, check, after = sweep.measure_level(settings, level, Silent())
    assert sum(record.output_tokens for record in outcome.records) == 100
    assert check is not None
    assert (check.status, check.server_tokens) == ("agree", 100)
    assert after == Reading("glm5-serve", 200, fake.counters()["prompt_tokens"])


def test_a_counter_one_percent_off_makes_the_level_invalid(fake: FakeServer) -> None:
    ran = run(fake, Script(counter_scale=1.01), Level(0, 2, requests=20, timeout_s=10), output_tokens=50)
    assert not ran.summary.valid
    assert ran.summary.reasons[0].startswith("token counts disagree")
    assert "the server made more" in ran.summary.reasons[0]
