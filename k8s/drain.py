"""`python -m k8s.drain`: the preStop hook of a worker pod. Takes its Ray node out of use and waits for the answers.

Ray marks the node as draining with a deadline; Serve starts replacements elsewhere where there is room, and in any case
stops the replicas here in time, each after its own drain. The hook ends when no replica is left, or at the deadline.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

POLL_S = 1.0
ASK_S = 60.0
REPLICA = "ray::ServeReplica:"


@dataclass(frozen=True)
class Node:
    """The Ray node of this pod. `raylet` is the process whose children are the node's workers."""

    id: str
    raylet: psutil.Process

    def replicas(self) -> int:
        """Serve replicas that live here."""
        try:
            children = self.raylet.children(recursive=True)
        except psutil.Error:
            return 0
        return sum(1 for child in children if (_command(child) or [""])[0].startswith(REPLICA))


def find_node(id: str | None = None) -> Node | None:
    """The node whose raylet runs here; `id` chooses where there are several (never in a pod)."""
    for process in psutil.process_iter():
        command = _command(process)
        if command and Path(command[0]).name == "raylet":
            settings = dict(part.lstrip("-").replace("-", "_").split("=", 1) for part in command[1:] if "=" in part)
            if "node_id" in settings and id in (None, settings["node_id"]):
                return Node(settings["node_id"], process)
    return None


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def ask(node: Node, deadline_s: float, address: str | None) -> str:
    """Have Ray take the node out of use within `deadline_s`. Empty, or why Ray did not take the request."""
    # `ray` as a command, not as a module: this process must not become a part of the cluster that it leaves.
    command = [str(Path(sys.executable).with_name("ray")), "drain-node", "--node-id", node.id]
    command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "the pod is being ended"]
    command += ["--deadline-remaining-seconds", str(int(deadline_s))]
    command += ["--address", address] if address else []
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S)
    except (OSError, subprocess.TimeoutExpired) as fault:
        return str(fault)
    return (asked.stderr.strip() or f"exit {asked.returncode}")[-500:] if asked.returncode else ""


def drain(deadline_s: float, address: str | None = None, id: str | None = None) -> int:
    """0: all replicas left. 1: some were still here at the deadline, or Ray did not take the request."""
    began = time.monotonic()
    node = find_node(id)
    if node is None:
        _say("no raylet runs here: nothing to drain")
        return 0
    if failure := ask(node, deadline_s, address):
        # Without a head there is nobody who could move replicas; running answers still get their time.
        _say(f"Ray did not take the drain: {failure}")
    while left := node.replicas():
        if time.monotonic() - began >= deadline_s:
            _say(f"{left} replicas are still here after {deadline_s:.0f} s")
            return 1
        time.sleep(POLL_S)
    _say(f"drained in {time.monotonic() - began:.0f} s")
    return 1 if failure else 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m k8s.drain", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--deadline-s", type=float, required=True, help="Longest that the drain may take, seconds.")
    parser.add_argument("--address", help="GCS address; default: the cluster of this pod.")
    parser.add_argument("--node-id", help="Which node, where several run here; default: the only one.")
    given = parser.parse_args()
    sys.exit(drain(given.deadline_s, given.address, given.node_id))


if __name__ == "__main__":
    main()
