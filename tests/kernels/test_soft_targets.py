"""The fused soft cross entropy: under Triton's interpreter, compiled for a GPU that need not be there, and on one."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from eaglelab.objectives.soft_targets import BY_TORCH, KERNEL, as_taken, load_kernel, soft_cross_entropy
from tests.kernels.conftest import Problem, check, needs_triton, run_file

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
COMPUTE_90 = 90
"""Hopper."""


@pytest.mark.parametrize(
    ("m", "S", "V", "K"), [(2, 3, 1, 0), (4, 7, 7, 0), (3, 1, 7, 7), (3, 4, 1_000, 0), (2, 1, 900, 9)]
)
def test_torch_s_operations_are_the_definition(m, S, V, K):
    """What kernels are compared with."""
    check(Problem.drawn(m, S, V, K), BY_TORCH, factor=3.0)


@needs_triton
def test_the_kernel_under_the_interpreter():
    run_file("interpreted.py", TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@needs_triton
@pytest.mark.parametrize("stored", ["fp32", "bf16"])
@pytest.mark.parametrize("top", [0, 16])
def test_the_kernel_compiles_for_a_gpu_without_spilling(stored, top, tmp_path, monkeypatch):
    """Down to machine code, with rows and distributions moved 16 bytes at a time."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from eaglelab.kernels.soft_targets import BLOCK, WARPS, terms_kernel

    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("Triton interprets here")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    types = {"x_ptr": f"*{stored}", "top_id_ptr": "*i64" if top else "*fp32", "top_weight": "fp32"}
    types |= dict.fromkeys(("S", "V", "K"), "i32")
    constants = {"GRADIENT": True, "BLOCK": BLOCK, "BLOCK_K": top}
    names = terms_kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "*fp32") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name == "V" or name.endswith("_ptr")}
    source = ASTSource(terms_kernel, signature, constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", COMPUTE_90, 32), options={"num_warps": WARPS})
    assert ".target sm_90" in compiled.asm["ptx"]
    assert re.search(r"ld\.global[.\w]*\.v4", compiled.asm["ptx"]) and re.search(
        r"st\.global[.\w]*\.v4", compiled.asm["ptx"]
    )

    binary, tool = tmp_path / "kernel.cubin", Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    binary.write_bytes(compiled.asm["cubin"])
    if not tool.exists():
        pytest.skip("compiled; the tool that reads its use of registers is not there")
    told = subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True, check=True).stdout
    used = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}
    assert used["STACK"] == used["LOCAL"] == 0
    assert used["REG"] <= 128, "two programs of eight warps fit a multiprocessor"


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("m", "S", "V", "K"),
    [
        (2, 3, 1, 0),
        (4, 7, 7, 0),
        (3, 1, 7, 7),
        (64, 7, 32_000, 0),
        (64, 1, 49_152, 10),
        (9, 1, 50_001, 4_096),
        (8, 2, 262_144, 0),
    ],
)
def test_the_kernel_on_a_gpu(m, S, V, K, dtype):
    check(Problem.drawn(m, S, V, K, dtype=dtype).to("cuda"), load_kernel(), factor=3.0)


@needs_gpu
def test_the_kernel_on_a_gpu_gives_the_same_bits_again():
    first, second = (Problem.drawn(64, 1, 32_000, 10).to("cuda").found(load_kernel()) for _ in range(2))
    assert all(one.equal(other) for one, other in zip(first, second, strict=True))


@needs_gpu
def test_more_than_2_31_logits_on_a_gpu():
    m, S, V = 1_100, 16, 131_072
    if torch.cuda.mem_get_info()[0] < 8 * 2**30:
        pytest.skip("too little memory is free")
    logit_mSV = torch.randn(1, 1, V, device="cuda").bfloat16().expand(m, S, V).contiguous().requires_grad_()
    q_mV = torch.randn(1, V, device="cuda").softmax(-1).expand(m, V)
    _, soft_mS, _, gradient_mSV = Problem(logit_mSV, q_mV, torch.ones(m, S, device="cuda")).found(load_kernel())
    assert (soft_mS == soft_mS[0, 0]).all() and gradient_mSV[-1].equal(gradient_mSV[0])


@needs_gpu
def test_a_gpu_uses_the_kernel():
    problem = Problem.drawn(5, 1, 1_000, 4, dtype=torch.bfloat16).to("cuda")
    assert KERNEL.refusal(problem.logit_mSV.device, torch.bfloat16) is None
    assert as_taken(problem.logit_mSV, torch.float32) is problem.logit_mSV
    loss, *_ = soft_cross_entropy(
        problem.logit_mSV.clone(), problem.q_mV, problem.weight_mS, problem.top_mK, problem.top_weight
    )
    torch.testing.assert_close(loss.double(), problem.exact()[0], rtol=1e-5, atol=0)
