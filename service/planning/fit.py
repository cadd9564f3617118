"""Least squares for a handful of positive parameters (Levenberg-Marquardt on logarithms, numeric derivatives)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Residuals = Callable[[Sequence[float]], Sequence[float]]


def least_squares(residuals: Residuals, start: Sequence[float], rounds: int = 60) -> tuple[float, ...]:
    """Positive parameters that minimise sum(residuals**2), from `start`. Deterministic."""
    x = np.log(np.asarray(start, dtype=float))

    def run(at: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.asarray(residuals([float(v) for v in np.exp(at)]), dtype=float)

    r = run(x)
    damping = 1e-2
    for _ in range(rounds):
        h = 1e-4
        jacobian = np.stack([(run(x + h * e) - r) / h for e in np.eye(len(x))], axis=1)
        normal = jacobian.T @ jacobian
        improved = False
        for _ in range(8):
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), -jacobian.T @ r)
            trial = x + np.clip(step, -0.7, 0.7)
            found = run(trial)
            if float(found @ found) < float(r @ r):
                gain = float(r @ r) - float(found @ found)
                x, r, damping, improved = trial, found, damping / 3, gain > 1e-10
                break
            damping *= 4
        if not improved:
            break
    return tuple(float(v) for v in np.exp(x))
