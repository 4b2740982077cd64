"""What Triton makes of its kernels, without a GPU: registers, spills, access widths, occupancy.

    python -m benchmarks.triton_proof      (where Triton is installed: make test-triton makes such a place)

compiles every variant of tests/triton_compile.py ahead of time for three architectures and writes
benchmarks/results/triton-proof.md. The exit status is 1 if a kernel spills, or if a float32 body has no
128-bit accesses.
"""

from __future__ import annotations

import sys
from pathlib import Path

RESULT = Path(__file__).resolve().parent / "results/triton-proof.md"
REGISTERS, MAX_THREADS, MAX_BLOCKS = 65536, 2048, 32  # per SM
# Bytes per element that a variant moves in memory, where that is one number.
BYTES = {
    "gather fp32": 12, "gather fp32 + norm": 12, "gather fp32 + inf norm": 12,
    "gather bf16 to fp32 + norm": 10, "gather bf16 to bf16 + norm": 6, "gather fp32 of two + norm": 12,
    "gather fp64 + norm": 24, "norm fp32": 4, "norm bf16": 2, "norm fp32, p = 3": 4, "scale fp32": 8,
    "adam fp32": 28, "adam fp32, amsgrad": 36, "adam bf16, fp32 state": 24, "adam bf16": 14,
    "adam fp32 + bf16 copy": 30, "adam fp64": 56, "sgd fp32": 12, "sgd fp32, momentum": 20,
}  # fmt: skip


def threads(kernel: str, registers: int) -> int:
    """Threads per SM that registers allow."""
    block = 512 if kernel.startswith("finish") else 128
    allocated = -(-registers // 8) * 8 * block
    return block * min(REGISTERS // allocated, MAX_THREADS // block, MAX_BLOCKS)


def main() -> int:
    """Compiles, writes the table; returns the exit status."""
    import triton

    from tests import triton_compile

    rows, faults = [], []
    for kernel, arch, registers, spills, load, store in triton_compile.table():
        rows.append(
            f"| {kernel} | {arch} | {registers} | {spills} | {load} | {store} | "
            f"{threads(kernel, registers)} | {BYTES.get(kernel, '')} |"
        )
        print(rows[-1], flush=True)
        if spills:
            faults.append(f"{kernel} spills {spills} bytes on {arch}")
        if (
            "fp32" in kernel
            and "misaligned" not in kernel
            and "p = 3" not in kernel
            and min(load, store) < 64
        ):
            faults.append(f"{kernel} has no vector accesses on {arch}")
    head = [
        "# What Triton makes of its kernels",
        "",
        f"`python -m benchmarks.triton_proof` with Triton {triton.__version__}. Load, store: the widest",
        "access in bits. Threads per SM: what registers allow, of 2048. Bytes per element: what the",
        "operation moves.",
        "",
        "| kernel | arch | registers | spills | load | store | threads/SM | bytes per element |",
        "|---|---|---|---|---|---|---|---|",
    ]
    RESULT.write_text("\n".join([*head, *rows]) + "\n")
    print("\n".join(faults) or f"no faults; {RESULT.name} is written")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
