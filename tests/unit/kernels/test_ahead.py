"""What is compiled ahead is all that any number of tokens needs: a sweep over all of them compiles nothing more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

MODEL = """
from service.engines.vllm.kernels.ahead import Embedding, Experts, Linear, Model
model = Model(
    "none", 132, 90, "bfloat16",
    (Linear(4, 512, 256, 1100), Linear(6, 128, 320, 40)),
    (Embedding(6, 128, 320, "int32"),),
    (Experts(4, 5, 8, 128, 256, 2, False, 70),),
)
"""
AHEAD = (
    MODEL
    + """
from service.engines.vllm.kernels.ahead import compile_ahead
print(compile_ahead(model, 0, 1, processes=2) > 0)
print(compile_ahead(model, 0, 1, processes=2))
"""
)
SWEEP = (
    MODEL
    + """
import torch
from triton.runtime import driver
from service.engines.vllm.kernels import ahead, choose
from service.engines.vllm.kernels.linear import unit
driver.set_active(ahead.Absent(90))
table = choose.Table("none", 132)
for w in model.linears:
    rows, pieces = -(-w.n // 64) * 64, w.k // 64
    for m in range(1, w.most + 1):
        tile = choose.linear_tile(table, w.form, rows, pieces, unit(w.form, pieces), m)
        ahead.compile_job((w, m, tile), torch.bfloat16)
for w in model.experts:
    for m in range(1, w.most + 1):
        tile = choose.moe_tile(table, (w.form13, w.form2), w.experts, w.inner, w.hidden, m, w.top_k, 1)
        ahead.compile_job((w, m, tile), torch.bfloat16)
ahead.compile_job((model.embeddings[0], 33, None), torch.bfloat16)
"""
)


def run(code: str, cache: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.timeout(600)
def test_after_compiling_ahead_no_number_of_tokens_compiles_anything(tmp_path: Path) -> None:
    assert run(AHEAD, tmp_path).split() == ["True", "0.0"], "a second start does nothing"
    made = sorted(tmp_path.rglob("*.cubin"))
    assert len({path.stem for path in made}) >= 6, "linears, decoding, embedding and experts, by their kernels' names"
    run(SWEEP, tmp_path)
    assert sorted(tmp_path.rglob("*.cubin")) == made


def test_products_of_a_loaded_model_each_once() -> None:
    import torch

    from service.engines.vllm.kernels.ahead import Embedding, Experts, Linear
    from service.engines.vllm.kernels.loaded import products
    from service.engines.vllm.kernels.offline import meta_packed
    from service.engines.vllm.kernels.ops import COPY_FROM
    from service.engines.vllm.kernels.quant_method import keep, packed_numbers

    class Layer(torch.nn.Module):
        expert_map = None

        class moe_config:
            experts_per_token = 2

    linear, same, head, experts, plain = Layer(), Layer(), Layer(), Layer(), Layer()
    parts = [meta_packed(4, 512, 256), meta_packed(8, 64, 256)]
    keep(linear, parts, None)
    keep(same, parts, None)
    head.num_embeddings = 128
    keep(head, [meta_packed(6, 128, 256)], None)
    experts.glm5_w13, experts.glm5_w2 = (
        packed_numbers(meta_packed(4, 2 * 64, 256)),
        packed_numbers(meta_packed(5, 256, 64)),
    )
    experts.glm5_w13_low = meta_packed(4, 2 * 64, 256, 8).low
    found = products([linear, same, head, experts, plain], 2048, 32)
    assert found == (
        (Linear(4, 512, 256, 2048), Linear(6, 128, 256, 32), Linear(8, 64, 256, 2048)),
        (Embedding(6, 128, 256, "int32"), Embedding(6, 128, 256, "int64")),
        (Experts(4, 5, 8, 64, 256, 2, False, 2048),),
    )
    # A copy takes over from COPY_FROM tokens on.
    copied = Layer()
    keep(copied, [meta_packed(4, 512, 256)], None)
    copied.glm5_copy_0 = torch.empty(1)
    assert products([copied], 2048, 32)[0] == (Linear(4, 512, 256, COPY_FROM - 1),)
