"""Keeps a local Ray on loopback. Ray 2.60 would listen on every interface in two places; both are closed here.

Patches of private names, so they stand in one file and tests/e2e look at the real sockets.
"""

from __future__ import annotations

import functools
from typing import Any

LOOPBACK = "127.0.0.1"


def keep_node_address() -> None:
    """Before `ray.init`: a given 127.0.0.1 stays so (Ray makes it the machine's own address, then binds to all)."""
    from ray._private import services

    services.resolve_ip_for_localhost = lambda host: host


def node_address() -> str:
    """Where this node's other processes, and other nodes, reach this one: loopback where Ray was started here."""
    import ray

    utilities: Any = ray.util
    address: str = utilities.get_node_ip_address()
    return address


def bind_replica() -> None:
    """In a replica's constructor: Serve opens the port for calls between deployments on [::] when that has run."""
    from ray.serve._private import replica

    internals: Any = replica
    if node_address() != LOOPBACK:
        return
    add_port = internals.add_port_to_grpc_server
    if isinstance(add_port, functools.partial):
        return

    def on_loopback(open_port: Any, server: Any, address: str) -> Any:
        return open_port(server, address.replace("[::]", LOOPBACK))

    internals.add_port_to_grpc_server = functools.partial(on_loopback, add_port)
