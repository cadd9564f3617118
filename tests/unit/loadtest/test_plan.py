"""Options, plans, prompts: all pure."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from loadtest import options
from loadtest.plan import Level, Workload, order, shards_for, shares
from loadtest.prompts import Prompt, Writer, load_dataset
from loadtest.wire import Target
from service.errors import UserError

TARGET = Target("h", 1, False, "")


@pytest.mark.parametrize(
    ("streams", "cpus", "shards"),
    [(1, 8, 1), (127, 8, 1), (128, 8, 2), (256, 8, 2), (1024, 8, 8), (1024, 2, 2), (500, 1, 1)],
)
def test_shards(streams: int, cpus: int, shards: int) -> None:
    assert shards_for(Level(0, streams, requests=streams), cpus) == shards


@pytest.mark.parametrize(("concurrency", "requests", "count"), [(5, 17, 2), (256, 1000, 3), (3, 3, 2), (1024, 4096, 8)])
def test_shares_add_up(concurrency: int, requests: int, count: int) -> None:
    parts = shares(TARGET, Workload("m"), Level(0, concurrency, requests=requests), count)
    assert sorted(lane for part in parts for lane in part.lanes) == list(range(concurrency))
    assert sum(part.requests for part in parts) == requests
    assert all(part.requests >= len(part.lanes) for part in parts)


def test_arrivals_are_dealt_and_poisson() -> None:
    level = Level(0, 0, rate=50.0, requests=2000, warmup=10)
    parts = shares(TARGET, Workload("m", seed=3), level, 2)
    times = sorted(t for part in parts for t, _ in part.arrivals)
    assert len(times) == 2010
    assert sum(warm for part in parts for _, warm in part.arrivals) == 10
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.1)
    assert sum((g - mean) ** 2 for g in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.25)
    assert shares(TARGET, Workload("m", seed=3), level, 2) == parts
    seconds = shares(TARGET, Workload("m"), Level(0, 0, rate=50.0, duration_s=4.0, warmup=10), 1)[0].arrivals
    assert 3.5 < seconds[-1][0] - seconds[10][0] <= 4.0


def test_every_second_repeat_runs_backwards() -> None:
    assert order([1, 8], 3) == [(0, 1), (0, 8), (1, 8), (1, 1), (2, 1), (2, 8)]


def test_levels_and_defaults() -> None:
    common = {"repeats": 1, "warmup": 1, "e2el_s": 2.0, "timeout_s": 9.0}
    levels = options.levels([1, 64], [], requests=None, duration_s=None, **common)  # type: ignore[arg-type]
    assert [(level.concurrency, level.requests) for level in levels] == [(1, 10), (64, 256)]
    with pytest.raises(UserError, match="fewer than the 64 streams"):
        options.levels([1, 64], [], requests=32, duration_s=None, **common)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="not both"):
        options.levels([1], [], requests=32, duration_s=1.0, **common)  # type: ignore[arg-type]
    (rate,) = options.levels([1], [2.5], requests=None, duration_s=None, **common)  # type: ignore[arg-type]
    assert (rate.rate, rate.duration_s, rate.warmup) == (2.5, 30.0, 10)


@pytest.mark.parametrize("text", ["", "1,x", "0", "4,4", "-1", "1.5"])
def test_bad_concurrency(text: str) -> None:
    with pytest.raises(UserError, match="--concurrency"):
        options.numbers(text, "--concurrency")


def test_slo_words() -> None:
    assert options.slo("ttft=500,tpot=50") == {"ttft": 0.5, "tpot": 0.05}
    assert options.slo("") == {}
    for bad in ("ttft", "ttft=fast", "speed=3"):
        with pytest.raises(UserError, match="--slo"):
            options.slo(bad)


@pytest.mark.parametrize("url", ["http://h", "h:99", "https://h/base/v1/", "http://h:8000/v1"])
def test_urls(url: str) -> None:
    target = Target.parse(url)
    assert target.host == "h"
    assert target.port == {"http://h": 80, "h:99": 99, "https://h/base/v1/": 443}.get(url, 8000)
    assert target.base == ("/base" if "base" in url else "")


@pytest.mark.parametrize("url", ["ftp://h", "http://", "http://h:port"])
def test_bad_urls(url: str) -> None:
    with pytest.raises(UserError):
        Target.parse(url)


def test_prompts_are_seeded_unique_and_of_the_length_asked() -> None:
    writer = Writer(7)
    texts = [writer.prompt(str(i), 200) for i in range(200)]
    again = Writer(7)
    assert [again.prompt(str(i), 200) for i in range(200)] == texts
    assert {len(text.split()) for text in texts} == {200}
    # No shared beginning for a prefix cache to find beyond the one word "Case".
    assert len({text[:17] for text in texts}) == 200
    assert Writer(8).prompt("0", 200) != texts[0]
    words = {word for text in texts for word in text.split()}
    assert 150 < len(words) < 1500  # language, neither noise nor one sentence over and over


def test_shared_prefix_by_choice() -> None:
    writer = Writer(7, shared_words=50)
    one, two = (writer.prompt(key, 200).split() for key in "ab")
    assert one[:50] == two[:50]
    assert one[51] != two[51]


def test_dataset(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"messages": [{"role": "user", "content": "b"}], "max_tokens": 5}\n')
    assert load_dataset(path) == [Prompt("a"), Prompt("b", ({"role": "user", "content": "b"},), 5)]
    work = Workload("m", output_tokens=9)
    assert work.body(load_dataset(path)[1])["max_tokens"] == 5
    assert work.body(load_dataset(path)[0])["max_tokens"] == 9
    for bad, where in (('{"text": "a"}', ":1 has neither"), ("{", ":1 is not JSON"), ("", "is empty"),
                       ('{"prompt": "a", "max_tokens": 0}', ":1: max_tokens")):  # fmt: skip
        path.write_text(bad)
        with pytest.raises(UserError, match=where):
            load_dataset(path)
