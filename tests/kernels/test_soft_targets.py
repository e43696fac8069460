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


@pytest.mark.parametrize(
    ("m", "S", "V", "K"), [(2, 3, 1, 0), (4, 7, 7, 0), (3, 1, 7, 7), (3, 4, 1_000, 0), (2, 1, 900, 9)]
)
def test_torch_s_operations_are_the_definition(m, S, V, K):
    """What kernels are compared with."""
    check(Problem.drawn(m, S, V, K), BY_TORCH, factor=3.0)


@needs_triton
def test_the_kernel_under_the_interpreter():
    run_file("interpreted.py", TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


def machine_code(name, types, constants, folder):
    """PTX, and registers, stack and local memory of each thread, of a kernel for compute capability 9.0.

    Pointers and the vocabulary are multiples of 16; arguments without a type are pointers to fp32.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from eaglelab.kernels import soft_targets as kernel_file

    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("Triton interprets here")
    kernel = getattr(kernel_file, name)
    names = list(kernel.arg_names)
    signature = {name: "constexpr" if name in constants else types.get(name, "*fp32") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name == "V" or name.endswith("_ptr")}
    source, target = ASTSource(kernel, signature, constants, aligned), GPUTarget("cuda", 90, 32)
    asm = triton.compile(source, target=target, options={"num_warps": kernel_file.WARPS}).asm
    binary, tool = folder / "kernel.cubin", Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    binary.write_bytes(asm["cubin"])
    if not tool.exists():
        pytest.skip("compiled; the tool that reads the use of registers is not there")
    told = subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True, check=True).stdout
    return asm["ptx"], {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}


@needs_triton
@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize("stored", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("top", [0, 16])
def test_the_kernel_compiles_for_a_gpu_without_spilling(stored, top, gradient, tmp_path, monkeypatch):
    """Rows and distributions are moved 16 bytes at a time, and two programs of eight warps fit a multiprocessor.

    In fp16 the assembler puts two numbers aside to fit five of them.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    types = {"x_ptr": f"*{stored}", "top_id_ptr": "*i64" if top else "*fp32", "top_weight": "fp32"}
    types |= dict.fromkeys(("S", "V", "K"), "i32")
    ptx, used = machine_code("terms_kernel", types, {"GRADIENT": gradient, "BLOCK": 4096, "BLOCK_K": top}, tmp_path)
    assert re.search(r"ld\.global[.\w]*\.v4", ptx)
    assert bool(re.search(r"st\.global[.\w]*\.v4", ptx)) == gradient
    assert used["STACK"] <= (8 if stored == "fp16" else 0) and used["LOCAL"] == 0 and used["REG"] <= 128


@needs_triton
def test_threads_wait_before_they_write_what_others_read_or_wrote(tmp_path, monkeypatch):
    """Between the reads of the top tokens' logits and the first gradient, and between that and the top tokens'."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    types = {"top_id_ptr": "*i64", "top_weight": "fp32"} | dict.fromkeys(("S", "V", "K"), "i32")
    ptx, _ = machine_code("terms_kernel", types, {"GRADIENT": True, "BLOCK": 4096, "BLOCK_K": 16}, tmp_path)
    access = re.findall(r"(?:ld|st)\.global[.\w]*?(?:\.v4)?\.b\d+|bar\.sync", ptx)
    order = "".join("b" if one.startswith("bar") else one[0].upper() if ".v4" in one else one[0] for one in access)
    # l, s: one number of a thread is loaded, stored; L, S: four; b: threads wait
    assert re.fullmatch(r"[lLsb]*L[lsb]*l[ls]*b+L+S+[lsb]*b[lsb]*s", order), order


@needs_triton
@pytest.mark.parametrize("stored", ["fp32", "bf16"])
def test_the_product_with_a_number_compiles_for_a_gpu(stored, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    _, used = machine_code("multiply_kernel", {"x_ptr": f"*{stored}", "count": "i64"}, {"BLOCK": 4096}, tmp_path)
    assert used["STACK"] == used["LOCAL"] == 0


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
