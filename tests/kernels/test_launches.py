"""Every launch as a Hopper would get it, compiled on any machine: the arguments fit the kernel, and
what begins before the kernel ahead of it has ended waits before it writes.
"""

from __future__ import annotations

import pytest

from tests.kernels.compiling import run_compiler

pytest.importorskip("triton")

LAUNCHES = """
from types import SimpleNamespace as Of
import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from kvrelay.kernels import block_tables, decode_plan, fp8_linear, fused_elementwise, fused_rope_write
from kvrelay.kernels import fused_sampling, gather_blocks, gpu_checksums, gpu_linear, grouped_gemm
from kvrelay.kernels import grouped_lora, launch, paged_decode, paged_prefill, skinny_gemm, uploads
from kvrelay.kernels import invariant_gemm, paged_prefill_hopper
from kvrelay.kernels.decoder_layer import Norm
from kvrelay.kernels.sampling_slots import SlotTables

class Hopper:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = get_current_stream = staticmethod(lambda device=None: 0)
    get_active_torch_device = staticmethod(lambda: torch.device("cpu"))

driver.set_active(Hopper())
facts = Of(multi_processor_count=132, shared_memory_per_multiprocessor=228 << 10)
torch.cuda.get_device_properties = lambda device=None: facts
here = {"capability": lambda device: (9, 0), "pdl_works": lambda device: True}
for module in (gpu_linear, grouped_gemm, invariant_gemm, launch, paged_decode, skinny_gemm):
    vars(module).update(here)
paged_prefill.hopper_serves = lambda *tensors: True

def launched(kernel, grid):
    def run(*arguments, **options):
        assert all(type(size) is int for size in grid)
        compiled = kernel.run(*arguments, grid=grid, warmup=True, **options)
        ptx, early = compiled.asm["ptx"], compiled.metadata.launch_pdl
        before, waits, _ = ptx.partition("griddepcontrol.wait")
        assert bool(waits) == early, kernel
        assert not early or not re.search(r"(st|atom|red)\\.global", before), kernel
        print(kernel.fn.__name__.strip("_"), "early" * early)
    return run

JITFunction.__getitem__ = launched
BF16, FP8, H = torch.bfloat16, torch.float8_e4m3fn, 512

def made(*shape, dtype=BF16):
    return torch.zeros(*shape, dtype=dtype)

def ints(*shape):
    return made(*shape, dtype=torch.int32)

norm = Norm(made(H), 1e-5)
for rows, weight in ((1, made(H, H)), (20, made(H, H)), (20, made(H + 8, H))):
    gpu_linear.GpuLinear(weight).normed(made(rows, H), norm)
gpu_linear.GpuLinear(made(H, H), batch_invariant=True).gated(made(5, H), "silu", norm)
fp8_linear.Fp8Linear(made(H, H, dtype=FP8), torch.ones(H))(made(3, H))
fused_elementwise.embed(ints(7), made(9, dtype=torch.int64), ints(7), made(100, H))
pool, tables = made(10, 2, 16, 128), ints(4, 8)
of_pool = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128}
fused_rope_write.rope_and_write(
    made(3, 12 * 128), ints(3), torch.zeros(64, 128), ints(3), ints(3), pool, pool, **of_pool
)
lora = {"tiles": grouped_lora.default_tiles(4, H)}
low = grouped_lora.shrink(made(4, H), made(3, 16, H), ints(4), **lora)
grouped_lora.expand(low, made(3, H, 16), ints(4), made(4, H), (H,), **lora)
experts = made(8, 2 * H, H), made(8, H, H)
grouped_gemm.moe(made(900, H), made(900, 8), *experts, top_k=2, renormalize=True)
space = decode_plan.DecodeWorkspace(max_batch=8, device="cpu", **of_pool)
decode_plan.plan_decode(ints(4), space, block_size=16, window=0)
heads = made(4, 8, 128)
attended = {"out": heads, "scale": 0.1}
paged_decode.paged_decode(heads, pool, pool, tables, ints(4), space, pdl=True, **attended)
starts, tiles = ints(2), torch.from_numpy(paged_prefill.prefill_tiles([4], [9], group=4))
paged_prefill.paged_prefill(heads, pool, pool, tables, starts, ints(1), tiles, **attended)
slots = SlotTables.empty(8, 3000, torch.device("cpu"))
fused_sampling.sample(made(4, 3000), ints(4), slots, cut=True, adjusted=True)
uploads.copy_words(ints(9), ints(9))
block_tables.append_blocks(ints(9, 8), ints(3), ints(3))
block_tables.step_tables(ints(3), ints(3), ints(3), ints(9, 8), ints(3, 8), block_size=16)
sizes = {"block_bytes": 64, "source_stride": 64, "target_stride": 64}
gather_blocks.gather_blocks(pool.data_ptr(), pool.data_ptr(), ints(3), ints(3), **sizes)
gpu_checksums.gpu_block_checksums(pool.data_ptr(), ints(3), 2, 64)
"""
EARLY = (
    *("act_and_mul", "arrange", "decode_kernel", "embed", "expand", "grouped_product"),
    *("invariant_kernel", "norm_rows", "quantize_rows", "ring_kernel", "rope_and_write", "route"),
    *("shrink", "sum", "tile_kernel", "vector_kernel"),
)


def test_kernels_are_given_what_they_take_and_wait_if_they_are_early() -> None:
    lines = [line.split() for line in run_compiler(LAUNCHES).splitlines()]
    assert {name for name, *early in lines if early} == {*EARLY}
    assert {name for name, *early in lines if not early} >= {"copy_words", "gather", "choose"}
