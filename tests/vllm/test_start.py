"""What two starts of one profile share: the key by which vLLM finds what it compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from service.engines.vllm import launch
from service.engines.vllm.options import VllmOptions
from tests.models import demo

KEY = """
import sys
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
import vllm.envs as envs
from vllm.config.utils import hash_factors

args = make_arg_parser(FlexibleArgumentParser(exit_on_error=False)).parse_args(sys.argv[1:])
config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
print("SIZES", *args.cudagraph_capture_sizes)
print("KEY", config.compute_hash(), hash_factors(envs.compile_factors()))
"""


@pytest.fixture(scope="module")
def model(workplace: Path) -> launch.Model:
    """As VllmEngine prepares it."""
    from service.gguf.header import read_header
    from service.gguf.materialise import linked_file, materialise

    header = read_header(demo())
    place = materialise(header, workplace / "cache" / "models", "dense")
    return launch.Model(linked_file(place, header), "m", header.architecture, place, 512, 8)


def key(model: launch.Model, options: VllmOptions, place: Path) -> str:
    """Of a start in a process of its own, whose temporary files lie in `place`, with the settings of a GPU."""
    place.mkdir()
    argv = launch.arguments(model, options, on_cpu=False, traces=place / "traces")
    env = os.environ | launch.variables(options, 2, place / "progress")
    done = subprocess.run(
        [sys.executable, "-c", KEY, *argv], env=env, capture_output=True, text=True, timeout=180, check=False
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("KEY ")]
    assert len(found) == 1, done.stderr[-3000:]
    assert f"SIZES {' '.join(map(str, launch.graph_sizes(options, model.slots)))}\n" in done.stdout
    return found[0]


@pytest.mark.timeout(600)
def test_a_second_start_finds_what_the_first_compiled(model: launch.Model, tmp_path: Path, plugin: None) -> None:
    first = key(model, VllmOptions(), tmp_path / "first")
    assert key(model, VllmOptions(), tmp_path / "second") == first
    # What changes the computation changes the key.
    assert key(model, VllmOptions(bf16_copies="all"), tmp_path / "third") != first
