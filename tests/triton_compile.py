"""What ptxas makes of the Triton kernels, without a GPU: registers, spills, widths of memory accesses.

``python tests/triton_compile.py`` prints the table. Needs Triton, not in interpreter mode.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TARGETS = (80, 90, 100)
FP32, BF16, FP64, ALL = 2, 4, 16, 30  # sets of dtypes: bit t for tag t


@dataclasses.dataclass(frozen=True)
class Build:
    """One kernel compiled for one target.

    Attributes:
        kernel: what it does.
        target: compute capability, 80 for sm_80.
        registers: per thread.
        spills: bytes of local memory per thread, stack included.
        widest_load: bits of the widest load from global memory.
        widest_store: bits of the widest store.
        wide_loads: how many loads are as wide as the widest.
        wide_stores: how many stores are as wide as the widest.
        fused: fused multiply-adds in the PTX.
        ptx: the PTX.
        sass: the machine code.
    """

    kernel: str
    target: int
    registers: int
    spills: int
    widest_load: int
    widest_store: int
    wide_loads: int
    wide_stores: int
    fused: int
    ptx: str = dataclasses.field(repr=False)
    sass: str = dataclasses.field(repr=False)

    def row(self) -> tuple[str, str, int, int, int, int]:
        """A row of the table: kernel, target, registers, spills, widest load, widest store."""
        return (
            self.kernel, f"sm_{self.target}", self.registers, self.spills, self.widest_load, self.widest_store
        )  # fmt: skip


def _gather(**changes: Any) -> tuple[str, dict[str, Any]]:
    import triton.language as tl

    constants = {"BUFFER": 1, "REAL": tl.float32, "FRESH": FP32, "KEPT": 0, "SUM": True, "NORM": 0}
    return "gather", {**constants, "ALIGNED": True, **changes}


def _norm(**changes: Any) -> tuple[str, dict[str, Any]]:
    return "norm", {"TYPES": FP32, "NORM": 0, "FLAGS": False, "ALIGNED": True, **changes}


def _scale(**changes: Any) -> tuple[str, dict[str, Any]]:
    import triton.language as tl

    return "scale", {"REAL": tl.float32, "SOURCE": FP32, "TARGET": FP32, "ALIGNED": True, **changes}


def _update(kernel: str, **changes: Any) -> tuple[str, dict[str, Any]]:
    import triton.language as tl

    constants = {"REAL": tl.float32, "PARAM": FP32, "STATE0": FP32, "STATE1": 0, "STATE2": 0, "COPY": 0}
    if kernel == "adam":
        constants["STATE1"] = FP32
    return kernel, {**constants, "GRAD": FP32, "ALIGNED": True, **changes}


def kernels() -> dict[str, tuple[str, dict[str, Any]]]:
    """The variants worth compiling: what each is called, its file and its constants."""
    import triton.language as tl

    double = {"BUFFER": 4, "REAL": tl.float64, "FRESH": FP64}
    return {
        "gather fp32": _gather(SUM=False),
        "gather fp32 + norm": _gather(),
        "gather fp32 + inf norm": _gather(NORM=2),
        "gather bf16 to fp32 + norm": _gather(FRESH=BF16),
        "gather bf16 to bf16 + norm": _gather(BUFFER=2, FRESH=BF16),
        "gather fp32 of two + norm": _gather(KEPT=FP32),
        "gather fp64 + norm": _gather(**double),
        "gather any dtype + norm": _gather(FRESH=ALL, KEPT=ALL),
        "gather fp32 + norm, misaligned": _gather(ALIGNED=False),
        "norm fp32": _norm(),
        "norm bf16": _norm(TYPES=BF16),
        "norm fp32, p = 3": _norm(NORM=3, FLAGS=True),
        "finish": ("finish", {"NORM": 0, "LRS": False, "FOUND": False}),
        "finish, inf norm": ("finish", {"NORM": 2, "LRS": True, "FOUND": True}),
        "finish, p = 3": ("finish", {"NORM": 3, "LRS": False, "FOUND": False}),
        "scale fp32": _scale(),
        "adam fp32": _update("adam"),
        "adam fp32, amsgrad": _update("adam", STATE2=FP32),
        "adam bf16, fp32 state": _update("adam", PARAM=BF16, GRAD=FP32),
        "adam bf16": _update("adam", PARAM=BF16, STATE0=BF16, STATE1=BF16, GRAD=BF16),
        "adam fp32 + bf16 copy": _update("adam", COPY=BF16),
        "adam any dtype but fp64": _update("adam", PARAM=14, STATE0=14, STATE1=14, COPY=4, GRAD=14),
        "adam fp64": _update("adam", REAL=tl.float64, PARAM=FP64, STATE0=FP64, STATE1=FP64, GRAD=FP64),
        "adam fp32, misaligned": _update("adam", ALIGNED=False),
        "sgd fp32": _update("sgd", STATE0=0),
        "sgd fp32, misaligned": _update("sgd", STATE0=0, ALIGNED=False),
        "sgd fp32, momentum": _update("sgd"),
    }


# What a pointer argument points to.
_POINTERS = {
    "partials": "*fp64", "strand_segment": "*i32", "segments": "*i64", "fresh": "*i64", "kept": "*i64",
    "weight": "*fp64", "kept_weight": "*fp64", "pointers": "*i64", "scale": "*fp64", "norm": "*fp32",
    "group_norms": "*fp64", "factor": "*fp64", "skip": "*i32", "skipped": "*i64", "steps": "*fp32",
    "scalars": "*fp64", "spans": "*i64", "max_norm": "*fp64", "divisor": "*fp64", "active": "*i64",
    "group": "*i32", "hyper": "*fp64", "table": "*i64", "grads": "*i64", "lrs": "*i64",
    "found_inf": "*fp32",
}  # fmt: skip
_BUFFERS = {1: "*fp32", 2: "*i16", 3: "*fp16", 4: "*fp64"}
_TYPES = (
    "FRESH", "KEPT", "TYPES", "SOURCE", "TARGET", "PARAM", "STATE0", "STATE1", "STATE2", "COPY", "GRAD"
)  # fmt: skip
_NUMBERS = {"power_bits": "i64", "limit_bits": "i64"}


def _output(tool: str, *args: str) -> str:
    """What one of the CUDA tools inside Triton prints."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    return subprocess.run([path, *args], capture_output=True, text=True, check=True).stdout


def _widths(sass: str, instruction: str) -> list[int]:
    """The width in bits of each access to global memory, ``LDG`` or ``STG`` (or the generic ones)."""
    found = []
    for match in re.finditer(rf"\b{instruction}G?\.E((?:\.\w+)*)", sass):
        width = re.search(r"\.(U?)(8|S8|16|S16|32|64|128|256)\b", match.group(1))
        found.append(int(width.group(2).removeprefix("S")) if width else 32)
    return found


def package() -> SimpleNamespace:
    """The kernels of the source tree beside the tests, else the installed ones."""
    import importlib

    name = "kernels" if (ROOT / "kernels").is_dir() else "fastaccum.kernels"
    if name == "kernels" and str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    files = ("strand", "gather", "norm", "finish", "scale", "adam", "sgd")
    return SimpleNamespace(**{file: importlib.import_module(f"{name}.{file}") for file in files})


@functools.cache
def build(kernel: str, target: int) -> Build:
    """Compiles one of :func:`kernels` ahead of time."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    file, constants = kernels()[kernel]
    if file != "finish":
        strand = package().strand
        types = [constants[name] for name in _TYPES if name in constants]
        power = constants.get("NORM") == strand.POWER.value
        constants["UNROLLED"] = (
            strand.unrolled(constants["ALIGNED"], *types) and not power and not constants.get("KEPT")
        )
    function = getattr(getattr(package(), file), f"{file}_kernel")
    signature, attrs = {}, {}
    for i, name in enumerate(function.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name == "buffer":
            signature[name] = _BUFFERS[constants["BUFFER"]]
            attrs[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = _POINTERS.get(name) or _NUMBERS.get(name, "i32")
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attrs)
    options = {"num_warps": 16 if file == "finish" else 4, "enable_fp_fusion": False}
    compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = _output("cuobjdump", "-res-usage", cubin.name)
        sass = _output("nvdisasm", "-c", cubin.name)
    used = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    loads, stores = _widths(sass, "LD"), _widths(sass, "ST")
    ptx = compiled.asm["ptx"]
    return Build(
        kernel, target, used["REG"], used["STACK"] + used["LOCAL"], max(loads), max(stores),
        loads.count(max(loads)), stores.count(max(stores)),
        len(re.findall(r"\bfma\.rn\.f(?:32|64)\b", ptx)), ptx, sass,
    )  # fmt: skip


def table() -> Iterator[tuple[str, str, int, int, int, int]]:
    """Rows of kernel, target, registers, spills, widest load and widest store in bits."""
    for kernel in kernels():
        for target in TARGETS:
            yield build(kernel, target).row()


if __name__ == "__main__":
    for kernel in kernels():
        for target in TARGETS:
            b = build(kernel, target)
            print(*b.row(), f"wide {b.wide_loads}/{b.wide_stores}", f"fma {b.fused}", sep=" | ", flush=True)
