"""`python -m k8s.drain`: the preStop hook of a worker pod. Takes its Ray node out of use and waits for the answers.

Ray marks the node as draining with a deadline; Serve starts replacements elsewhere where there is room, and in any case
stops the replicas here in time, each after its own drain. The hook ends when no replica is left, or at the deadline.
It runs on the standard library and psutil alone: a pod that ends may have no head to talk to any more.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

POLL_S = 1.0
ASK_S = 30.0
REPLICA = "ray::ServeReplica:"


def node_id() -> str | None:
    """The Ray node of this pod: its raylet has it among its arguments."""
    for command in _commands():
        if Path(command[0]).name == "raylet":
            for argument in command:
                key, _, value = argument.partition("=")
                if key in ("--node_id", "--node-id"):
                    return value
    return None


def replicas() -> int:
    """Serve replicas that live in this pod."""
    return sum(1 for command in _commands() if command[0].startswith(REPLICA))


def _commands() -> Iterator[list[str]]:
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
        except psutil.Error:
            continue
        if command:
            yield command


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def drain(deadline_s: float, address: str | None) -> int:
    """0: all replicas left. 1: some were still here at the deadline, or Ray did not take the request."""
    began = time.monotonic()
    node = node_id()
    if node is None:
        _say("no raylet runs here: nothing to drain")
        return 0
    # `ray` as a command, not as a module: this process must not become a part of the cluster that it leaves.
    command = [str(Path(sys.executable).with_name("ray")), "drain-node", "--node-id", node]
    command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "the pod is being ended"]
    command += ["--deadline-remaining-seconds", str(int(deadline_s))]
    command += ["--address", address] if address else []
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S)
        failure = asked.stderr.strip()[-500:] if asked.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as fault:
        failure = str(fault)
    if failure:
        # Without a head there is nobody who could move replicas; running answers still get their time.
        _say(f"Ray did not take the drain: {failure}")
    while left := replicas():
        if time.monotonic() - began >= deadline_s:
            _say(f"{left} replicas are still here after {deadline_s:.0f} s")
            return 1
        time.sleep(POLL_S)
    _say(f"drained in {time.monotonic() - began:.0f} s")
    return 1 if failure else 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m k8s.drain", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--deadline-s", type=float, required=True, help="Longest that the drain may take, seconds.")
    parser.add_argument("--address", help="GCS address; default: the cluster of this pod.")
    given = parser.parse_args()
    sys.exit(drain(given.deadline_s, given.address))


if __name__ == "__main__":
    main()
