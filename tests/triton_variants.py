"""How many variants of each kernel the launchers make Triton compile, by a driver that launches nothing.

Prints a JSON object: kernel, variants. Run as a program: the driver replaces Triton's own.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import triton
from triton.backends.compiler import GPUTarget

from fastaccum.layout import Layout
from tests.triton_tables import entries, kernel_package, tables


class Driver:
    """As much of a driver as compilation asks for."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def variants() -> dict[str, int]:
    """Calls the launchers with everything changed that must not matter."""
    found: dict[str, int] = {}

    def launch(
        kernel: Any, programs: int, device: torch.device, *args: Any, num_warps: int = 4, **constants: Any
    ) -> None:
        kernel.warmup(*args, **constants, grid=(programs,), num_warps=num_warps, enable_fp_fusion=False)
        found[kernel.fn.__name__] = len(kernel.device_caches[0][0])

    package = kernel_package()
    for file in ("strand", "gather", "norm", "finish", "scale"):
        module = importlib.import_module(f"{package.__name__}.{file}")
        module.launch = launch  # type: ignore[attr-defined]
    double, options = {"dtype": torch.float64}, {"aligned": True}
    for n in (1, 16, 9000):
        strands, segments = tables(Layout.of([9000] * min(n, 17)))
        x = torch.zeros(9216 * min(n, 17))
        one = torch.ones(n + 1, **double)[1:][0]  # aligned to 8 bytes only
        partials = torch.zeros(2, n + len(strands), **double)[:, n:]
        pointers, table = entries([x] * len(segments)), torch.zeros(6, len(segments), dtype=torch.int64)
        fp32, none = (1,), ()
        package.launch_gather(
            x, partials, strands, segments, pointers, None, one, None, 2.0, dtypes=[fp32, none], **options
        )
        for norm_type in (2.0, 3.0, 2.5, float(n + 2)):
            package.launch_norm(
                partials, strands, segments, pointers, norm_type, one, dtypes=[fp32], **options
            )
        for max_value in (math.inf, 1.0, float(n)):
            package.launch_scale(
                strands, segments, table, one.view(1), max_value, dtypes=[fp32, fp32], **options
            )
        hyper, scalars = torch.zeros(n, 10 + n % 7, **double)[:, :10], torch.zeros(n, 4, **double)
        skip = torch.zeros((), dtype=torch.int32)
        for name, states in (("adam", [fp32, fp32]), ("sgd", [fp32, none])):
            getattr(package, f"launch_{name}")(
                strands, segments, table, pointers, hyper, scalars, one.view(1), skip,
                dtypes=[fp32, *states, none, none, fp32], **options,
            )  # fmt: skip
        package.launch_finish(
            torch.zeros(()), torch.zeros(n, **double), torch.zeros(n, **double), skip, torch.tensor(0),
            torch.zeros(n), scalars, partials, torch.zeros(n, 3, dtype=torch.int64),
            torch.zeros(n, **double), one, one, pointers, torch.zeros(n, dtype=torch.int64), hyper, 2.0, None,
            n == 1,
        )  # fmt: skip
    return found


if __name__ == "__main__":
    triton.runtime.driver.set_active(Driver())
    print(json.dumps(variants()))
