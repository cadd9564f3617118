"""Pictures of a plan. matplotlib is optional and imported only here."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from service.errors import UserError
from service.planning.plan import Plan

ORDER = ("weights", "kernels", "kv", "allreduce", "launch", "draft", "host")


def pyplot() -> ModuleType:
    """matplotlib.pyplot without a display. Raises UserError saying what to install."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise UserError("plots need matplotlib, which is not installed: pip install 'glm5-serve[plots]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    module: ModuleType = plt
    return module


def plot_plan(plan: Plan, path: Path) -> None:
    """Two panels: tok/s by users with its band, and the step's split by users. Format by the file's suffix."""
    plt = pyplot()
    figure, (speed, split) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    users = [r.concurrency for r in plan.rates]
    speed.fill_between(users, [r.low for r in plan.rates], [r.high for r in plan.rates], alpha=0.2)
    speed.plot(users, [r.tok_s for r in plan.rates], marker="o")
    speed.set(xscale="log", yscale="log", xlabel="users", ylabel="output tok/s, all users")
    speed.set_title(f"{plan.model.shape.name} on {plan.model.box.name} ({plan.basis})", parse_math=False)
    speed.grid(alpha=0.3)
    bottom = [0.0] * len(users)
    labels = [str(u) for u in users]
    for part in ORDER:
        heights = [r.split.parts[part] * 1e3 for r in plan.rates]
        if any(heights):
            split.bar(labels, heights, bottom=bottom, label=part)
            bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    split.set(xlabel="users", ylabel="ms a step")
    split.set_title("one decode step by cause")
    split.legend(fontsize=8)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as fault:
        raise UserError(f"cannot write the plot {path}: {fault}") from None
    finally:
        plt.close(figure)
