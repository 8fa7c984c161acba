"""Compiles the Triton kernel for GPUs, which takes none, in an environment that has Triton."""

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from outrider.plugins.common import kernel

CAPABILITIES = (75, 80, 90, 100)
TYPES = {
    "z_ptr": "*fp32", "z_stride": "i64", "seed_ptr": "*i64", "position_ptr": "*i64",
    "best_ptr": "*fp32", "token_ptr": "*i32", "blocks": "i32", "size": "i32",
}  # fmt: skip


def assembly(capability: int, greedy: bool) -> str:
    """Return the PTX of the kernel as ``draw`` calls it; the machine code is made as well."""
    constants = {"HAS_GREEDY": greedy, "WIDTH": kernel.WIDTH}
    types = {**TYPES, "greedy_ptr": "*i8" if greedy else "*i64"}
    source = ASTSource(
        kernel._draw_kernel,
        {name: types.get(name, "constexpr") for name in kernel._draw_kernel.arg_names},
        constants,
    )
    made = triton.compile(source, GPUTarget("cuda", capability, 32), {"enable_fp_fusion": False})
    assert made.asm["cubin"]
    ptx: str = made.asm["ptx"]
    return ptx


def main() -> None:
    for capability in CAPABILITIES:
        for greedy in (False, True):
            ptx = assembly(capability, greedy)
            assert "mul.rn.f32" in ptx, capability
            assert "fma." not in ptx, capability
    print("compiled")


if __name__ == "__main__":
    main()
