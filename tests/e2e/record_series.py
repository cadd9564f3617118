"""The data of the picture in docs/: a real service under several concurrencies for some minutes, seen by a Prometheus.

python -m tests.e2e.record_series SERIES.json
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

from dashboards.picture.series import keep
from tests.e2e.prometheus import prometheus
from tests.e2e.traffic import run_level
from tests.service import running

STEPS = ((1, "priority"), (2, "default"), (4, "default"), (8, "flex"), (1, "priority"))
STEP_S = 36.0
TOKENS = 48


def main(out: Path) -> None:
    with (
        running() as service,
        tempfile.TemporaryDirectory() as folder,
        prometheus(Path(folder), {"glm5": f"{service.url}/metrics"}) as there,
    ):
        time.sleep(3.0)
        start = time.time()
        for at_once, tier in STEPS:
            end = time.monotonic() + STEP_S
            while time.monotonic() < end:
                run_level(service.url, service.model, at_once, TOKENS, tier)
        time.sleep(3.0)
        variables = {"$job": "glm5", "$pool": ".*", "$__rate_interval": "15s"}
        out.write_text(json.dumps(keep("serving.json", there.url, variables, start, time.time())))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
