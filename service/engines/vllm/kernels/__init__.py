"""GGUF weights at the speed of the memory: repacked at load, read by our own Triton kernels.

    reference.py     what each GGUF type means, in float64 (the standard every kernel is judged by)
    repack.py        raw GGUF bytes -> Packed, the form that the kernels read
    decode.py        device code: Packed planes -> fp16 weights in registers -> tensor cores, with guarded numerics
    linear.py moe.py the two products: how they are launched (linear_device.py, moe_device.py: their kernels)
    choose.py        which tile sizes for which shape and M (tables in tuned/, made by measure.py, tune.py and cli.py)
    offline.py       compile for a GPU that is not here
    ahead.py         compile all that a loaded model can need, in parallel, before its first step (loaded.py: what)
    ops.py           the same as torch custom ops, so that torch.compile and CUDA graphs see through them
    quant_method.py  slots into vLLM through vllm-gguf-plugin's registry

Only quant_method.py and loaded.py import vLLM. Nothing here is imported before it is used: Triton is heavy.
"""
