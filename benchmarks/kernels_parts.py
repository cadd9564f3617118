"""Where the prefill path's time goes: its four steps timed one by one. Run: python -m benchmarks.kernels_parts"""

import torch

from service.engines.vllm.kernels import linear as L
from service.engines.vllm.kernels.measure import Bench, LinearShape, graph_us


def main() -> None:
    for shape in (LinearShape("q_a+kv_a", 4, 2624, 6144), LinearShape("lm_head", 6, 19360, 6144)):
        bench = Bench(shape)
        w16 = [torch.randn(shape.n, shape.k, device="cuda").half() for _ in range(4)]
        for m in (256, 1024):
            x = bench.tokens(m)
            x16, back = x.half(), torch.ones(m, device="cuda")
            wide = torch.empty(m, shape.n, device="cuda")
            out = torch.empty(m, shape.n, device="cuda", dtype=torch.bfloat16)
            b16 = [w.bfloat16() for w in w16]
            grid = (m, -(-shape.n // 1024))
            steps = {
                "scale": lambda i: L.scale_kernel[(m,)](x, x16, back, shape.k, BLOCK=1024, num_warps=4),
                "decode": lambda i: L.decode_rows(bench.w[i % bench.copies], 0, shape.n, w16[i], 1.0),
                "mm fp16 to fp32": lambda i: torch.mm(x16, w16[i].T, out_dtype=torch.float32),
                "mm fp16": lambda i: torch.mm(x16, w16[i].T),
                "mm bf16": lambda i: torch.mm(x, b16[i].T),
                "unscale": lambda i: L.unscale_kernel[grid](wide, back, out, 1.0, shape.n, shape.n, 0, BLOCK=1024),
            }
            print(shape.name, m, {k: round(graph_us(f, 4), 1) for k, f in steps.items()}, flush=True)


if __name__ == "__main__":
    main()
