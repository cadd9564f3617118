"""The dashboard *GPU box*: what the eight GPUs of a tensor-parallel group do, from NVIDIA's DCGM exporter."""

from __future__ import annotations

from dashboards import promql as q
from dashboards.panels import Board, Panel, Query, Row, Variable

BOX = 'Hostname=~"$box"'


def board() -> Board:
    return Board(
        uid="glm5-gpu-box",
        title="GLM-5 GPU box",
        about="DCGM figures of the boxes that serve: are the GPUs busy, alike, cool and whole.",
        rows=(_work(), _alike(), _health()),
        variables=(
            Variable("job", "job", "glm_replica_starts_total"),
            Variable("box", "Hostname", "DCGM_FI_DEV_POWER_USAGE", many=True),
        ),
    )


def _each(metric: str) -> tuple[Query, ...]:
    return (Query(f"{metric}{{{BOX}}}", "{{Hostname}} GPU {{gpu}}"),)


def _work() -> Row:
    return Row(
        "Work",
        (
            Panel(
                "Tensor cores active",
                "Share of cycles in which the tensor pipe is busy. Low at one user: memory and links bound decoding.",
                _each("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"),
                "percentunit",
                high=1,
            ),
            Panel(
                "DRAM active",
                "Share of cycles in which memory moves data. 12 % at one user means that memory is not the limit.",
                _each("DCGM_FI_PROF_DRAM_ACTIVE"),
                "percentunit",
                high=1,
            ),
            Panel(
                "PCIe, sent and received",
                "The all-reduces of tensor parallelism go over PCIe on a box without NVLink.",
                (
                    Query(f"DCGM_FI_PROF_PCIE_TX_BYTES{{{BOX}}}", "sent, {{Hostname}} GPU {{gpu}}"),
                    Query(f"DCGM_FI_PROF_PCIE_RX_BYTES{{{BOX}}}", "received, {{Hostname}} GPU {{gpu}}"),
                ),
                "Bps",
            ),
            Panel("GPU memory in use", "Weights, KV cache and workspace.", _each("DCGM_FI_DEV_FB_USED"), "mbytes"),
            Panel("Power", "Draw of each GPU.", _each("DCGM_FI_DEV_POWER_USAGE"), "watt"),
            Panel(
                "Joules per output token",
                "Energy of the chosen boxes' GPUs over the tokens that the service generated. True where the chosen "
                "boxes are the service's.",
                (
                    Query(
                        f"sum(rate(DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{{{BOX}}}[$__rate_interval])) / 1000 / "
                        f"(sum(rate(glm_output_tokens_total{{{q.JOB}}}[$__rate_interval])) > 0)",
                        "J per token",
                    ),
                ),
                "joule",
            ),
        ),
    )


def spread(metric: str, where: str = BOX) -> str:
    """(most - least) / mean over the GPUs of a box: 0 where all ranks are alike."""
    selected = f"{metric}{{{where}}}" if where else metric
    by = "by (Hostname)"
    return f"(max {by} ({selected}) - min {by} ({selected})) / (avg {by} ({selected}) > 0)"


def _alike() -> Row:
    return Row(
        "Skew over the ranks of a tensor-parallel group",
        (
            Panel(
                "Spread of tensor activity",
                "Ranks do equal work in lockstep: a rank that differs is slowed, and slows all eight.",
                (Query(spread("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"), "{{Hostname}}"),),
                "percentunit",
            ),
            Panel(
                "Spread of SM clocks",
                "One GPU that throttles (heat, power) shows here first.",
                (Query(spread("DCGM_FI_DEV_SM_CLOCK"), "{{Hostname}}"),),
                "percentunit",
            ),
            Panel("SM clock", "Clock of each GPU.", (_each("DCGM_FI_DEV_SM_CLOCK")), "MHz"),
        ),
    )


def _health() -> Row:
    return Row(
        "Health",
        (
            Panel("Temperature", "Of each GPU.", _each("DCGM_FI_DEV_GPU_TEMP"), "celsius"),
            Panel(
                "Last XID",
                "Number of the driver's last error for each GPU; 0 is none. It stays until the exporter restarts.",
                _each("DCGM_FI_DEV_XID_ERRORS"),
            ),
            Panel(
                "PCIe replays",
                "Packets sent again, per second: a bad riser or slot.",
                (
                    Query(
                        f"rate(DCGM_FI_DEV_PCIE_REPLAY_COUNTER{{{BOX}}}[$__rate_interval])", "{{Hostname}} GPU {{gpu}}"
                    ),
                ),
            ),
        ),
    )
