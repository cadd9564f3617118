"""What the board keeps of processes that leave, die, fall silent and speak again. No Ray: time and pids are given."""

from __future__ import annotations

import os
import subprocess
import sys

from deployments.pins import HUNG_S, LOADING_S, STALE_S, Pins, lives
from service.fleet.post import Post
from service.metrics.declared import Metrics
from service.metrics.exchange import merge, snapshot
from service.metrics.news import AGAIN_S, News
from service.metrics.recorders import ReplicaRecorder
from service.metrics.totals import REMEMBERED
from service.types import Delta, EngineStats
from tests.unit.metrics.read import Clock, samples, total

SLOTS = 8


def word(id: str, node: str = "elsewhere", pid: int = 0) -> bytes:
    return Post(id, "replica", "shared", ready=True, node=node, pid=pid).encode()


def counted(tokens: int) -> bytes:
    """The metrics of a process that has made so many tokens."""
    metrics = Metrics()
    replica = ReplicaRecorder(metrics, "shared", SLOTS)
    with replica.request("default") as request:
        request.chunk(Delta(output_tokens=tokens))
    replica.engine(EngineStats(SLOTS))
    return snapshot(metrics)


class Machine:
    """The board's own node `here`: its clock, and the pids that live there."""

    def __init__(self) -> None:
        self.clock, self.pids = Clock(), {41, 42}
        self.pins = self.fresh()

    def fresh(self) -> Pins:
        return Pins("here", self.clock, self.pids.__contains__)

    def read(self) -> tuple[float, float]:
        """(output tokens, slots) of the service, as /metrics has them."""
        found = samples(merge(self.pins.metrics()[0]))
        return total(found, "glm_output_tokens_total"), total(found, "glm_slots")

    def ids(self) -> list[str]:
        return [Post.decode(post).id for post in self.pins.posts()[1]]


def test_a_silent_process_keeps_its_counts_when_it_speaks_again_without_metrics() -> None:
    machine = Machine()
    machine.pins.pin("r", word("r"), counted(500), "native 1")
    assert machine.read() == (500, SLOTS)
    machine.clock.pass_(STALE_S + 1)
    assert (machine.read(), machine.ids(), machine.pins.metrics()[1]) == ((500, 0), [], {})
    machine.pins.pin("r", word("r"), None)
    assert (machine.read(), machine.ids()) == ((500, 0), ["r"])  # slots come with its next snapshot
    machine.pins.pin("r", None, counted(500))
    assert machine.read() == (500, SLOTS)
    machine.pins.pin("r", None, counted(507))
    assert machine.read() == (507, SLOTS)


def test_silent_again_and_again_is_counted_once() -> None:
    machine = Machine()
    for tokens in (500, 500, 520):
        machine.pins.pin("r", word("r"), counted(tokens))
        machine.clock.pass_(STALE_S + 1)
        assert machine.read() == (tokens, 0)
        machine.pins.pin("r", word("r"), None)
        machine.clock.pass_(STALE_S + 1)
        assert machine.read() == (tokens, 0)


def test_who_leaves_stays_in_the_totals_once() -> None:
    machine = Machine()
    machine.pins.pin("r", word("r"), counted(500))
    machine.pins.pin("other", word("other"), counted(20))
    machine.pins.unpin("r")
    machine.pins.unpin("r")
    machine.pins.unpin("never seen")
    assert (machine.read(), machine.ids()) == ((520, SLOTS), ["other"])


def test_who_leaves_after_a_silence_stays_in_the_totals_once() -> None:
    machine = Machine()
    machine.pins.pin("r", word("r"), counted(500))
    machine.clock.pass_(STALE_S + 1)
    assert machine.read() == (500, 0)
    machine.pins.pin("r", word("r"), None)
    machine.pins.unpin("r")
    assert (machine.read(), machine.ids()) == ((500, 0), [])


def test_a_dead_pid_of_this_node_is_gone_at_once_and_its_counts_stay() -> None:
    machine = Machine()
    machine.pins.pin("a", word("a", "here", 41), counted(500))
    machine.pins.pin("b", word("b", "here", 42), counted(20))
    machine.pins.pin("c", word("c", "elsewhere", 43), counted(3))
    assert (machine.read(), machine.ids()) == ((523, 3 * SLOTS), ["a", "b", "c"])
    machine.pids.remove(41)
    assert (machine.ids(), machine.read()) == (["b", "c"], (523, 2 * SLOTS))


def test_last_word_of_a_dead_process_that_comes_late_replaces_its_counts() -> None:
    machine = Machine()
    machine.pins.pin("a", word("a", "here", 41), counted(500))
    machine.pids.remove(41)
    assert machine.read() == (500, 0)
    machine.pins.pin("a", word("a", "here", 41), counted(504))
    assert (machine.read(), machine.ids()) == ((504, 0), [])


def test_a_process_of_this_node_whose_pid_lives_may_be_silent_for_longer() -> None:
    machine = Machine()
    machine.pins.pin("near", word("near", "here", 41), None)
    machine.pins.pin("far", word("far"), None)
    machine.clock.pass_(STALE_S)
    assert machine.ids() == ["near", "far"]
    machine.clock.pass_(0.1)
    assert machine.ids() == ["near"]
    machine.clock.pass_(HUNG_S - STALE_S)
    assert machine.ids() == []


def test_a_replica_that_loads_may_be_silent_for_minutes_but_not_dead() -> None:
    machine = Machine()
    loading = [Post(id, "replica", "shared", node="here", pid=pid).encode() for id, pid in (("a", 41), ("b", 42))]
    for id, post in zip("ab", loading, strict=True):
        machine.pins.pin(id, post, None)
    machine.clock.pass_(LOADING_S)
    machine.pids.discard(42)
    assert machine.ids() == ["a"]
    machine.clock.pass_(0.1)
    assert machine.ids() == []


def test_a_thousand_silent_processes_take_bounded_room_and_count_exactly() -> None:
    machine = Machine()
    for number in range(1000):
        machine.pins.pin(str(number), word(str(number)), counted(number))
    machine.clock.pass_(STALE_S + 1)
    assert machine.read() == (sum(range(1000)), 0)
    assert len(machine.pins.metrics()[0]) == 1
    assert machine.pins._totals.apart == REMEMBERED
    last = "999"
    machine.pins.pin(last, word(last), counted(1000))
    assert machine.read() == (sum(range(1000)) + 1, SLOTS)


def test_an_empty_board_learns_an_idle_replica_again() -> None:
    machine, news, idle = Machine(), News(), counted(500)

    def beat() -> bool:
        fresh = news.pick(idle, machine.clock())
        machine.pins.pin("r", word("r"), fresh)
        machine.clock.pass_(0.5)
        return fresh is not None

    assert [beat() for _ in range(3)] == [True, False, False]
    machine.pins = machine.fresh()  # Ray restarted the actor
    beats = 0
    while machine.read() != (500, SLOTS):
        beat()
        beats += 1
        assert beats * 0.5 <= AGAIN_S, "the idle replica's series did not come back in time"


def test_age_and_posts_of_a_board() -> None:
    machine = Machine()
    machine.clock.pass_(0.7)
    machine.pins.pin("quiet", None, counted(1))
    age, posts = machine.pins.posts()
    assert (round(age, 3), posts) == (0.7, [])


def test_a_process_lives_until_it_has_ended_even_if_nobody_waits_for_it() -> None:
    assert lives(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert lives(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and still in the table: a zombie
    assert not lives(child.pid)
    child.communicate()
    assert not lives(child.pid)
