"""The `ray:` part of a profile."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def _own_resource(name: str) -> str:
    if name in ("CPU", "GPU", "memory", "object_store_memory") or name.startswith("node:") or not name:
        raise ValueError("this name is Ray's own; CPUs are set by ray.num_cpus, memory by ray.object_store_mib")
    return name


# Ray's own bound; of a node's resources it takes whole numbers only.
Amount = Annotated[float, Field(ge=0, le=1e14, multiple_of=1)]


class RayConfig(BaseModel):
    """The Ray cluster beneath."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    address: str | None = Field(
        None, description="Join this cluster (host:port, or `auto`). Empty: start Ray here, on loopback."
    )
    num_cpus: int | None = Field(
        None,
        ge=1,
        le=65_536,
        description="CPUs that the local Ray is told of. Empty: all (at least 4, so that small replicas fit).",
    )
    resources: dict[Annotated[str, AfterValidator(_own_resource)], Amount] = Field(
        default_factory=dict, description="Extra Ray resources of the local node, such as `slot`."
    )
    object_store_mib: int = Field(128, ge=80, le=1 << 24, description="Shared memory for Ray's object store, MiB.")
