"""Checks of the emulated CUDA kernels, for whichever library a process has loaded.

A library's ops can be registered once per process, so what needs another library than the plain one runs
as ``python -m tests.cuda_checks``, with jobs ``[[name, library, check, arguments], ...]`` as JSON on its
standard input: each in a child of its own (torch is imported once). The results are the last line.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests import cases, emulated
from tests.bits import assert_same, clone, different, tensors_of
from tests.cases import BY_NAME, CASES, OpCase, Variant
from tests.cuda_on_cpu.emulator import ORDERS, Emulator

WIDTHS = {4: 9, 8: 10}  # elements of float32 per access: a compute capability that has it
LAUNCHED = "kernels launched: "  # a job's last line
F32, BF16, F16, F64 = cases.F32, cases.BF16, cases.F16, cases.F64


def kernels_in(library: Path) -> set[str]:
    """The kernels of a library that can be launched, named as the emulation names them."""
    text = subprocess.run(["nm", "-C", library], capture_output=True, text=True, check=True).stdout
    names = re.findall(r" t (?:void )?(fastaccum::gpu::.*_kernel<.*>)\(", text)
    # Words to store always come by value.
    return {plain_name(name) for name in names if "store_kernel<fastaccum::gpu::OnDevice" not in name}


def plain_name(name: str) -> str:
    """A kernel's name without namespaces and with numbers only: nm and the emulation differ there."""
    name = re.sub(r"\(anonymous namespace\)::|fastaccum::gpu::|fastaccum::", "", name)
    return name.replace("(Norm)", "").replace("> >", ">>")


def launched(e: Emulator) -> list[str]:
    """The kernels launched since the last reset."""
    return [plain_name(name) for name in e.launches]


def families(e: Emulator) -> list[str]:
    """The same, without template arguments."""
    return [name.split("<")[0].removesuffix("_kernel") for name in launched(e)]


# --------------------------------------------------------------------------------------- one call


def guarded(e: Emulator, named: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments in buffers of the emulation, which end at unmapped pages, aligned as they were."""
    e.set(alignment=32)

    def moved(tensor: Any, name: str) -> Any:
        if not isinstance(tensor, Tensor) or not tensor.numel():
            return tensor
        n = tensor.numel()
        if tensor.dim() == 2 and not tensor.is_contiguous() and tensor.stride(1) == 1:
            tensor = tensor.contiguous()
        shift = tensor.data_ptr() % 32 // tensor.element_size()
        flat = e.empty(n, tensor.dtype, name, shift=shift)
        flat.copy_(torch.as_strided(tensor, (n,), (1,)))
        return torch.as_strided(flat, tensor.shape, tensor.stride())

    return {
        name: [moved(t, f"{name}{i}") for i, t in enumerate(value)]
        if isinstance(value, (list, tuple))
        else moved(value, name)
        for name, value in named.items()
    }


def assert_values(got: Mapping[str, Any], wanted: Mapping[str, Any], note: str, exact: bool = True) -> None:
    """Like assert_same, of the tensors alone: their storages may differ."""
    for (name, a), (_, b) in zip(tensors_of(got), tensors_of(wanted), strict=True):
        if not exact and a.is_floating_point():
            rtol = 1e-12 if a.dtype == F64 else torch.finfo(a.dtype).eps
            assert torch.allclose(a, b, rtol=rtol, atol=0, equal_nan=True), f"{note}: {name}"
            continue
        bad = different(a.contiguous(), b.contiguous())
        assert not bad.any(), f"{note}: {name} differs, at {bad.nonzero()[:4].tolist()} of {list(a.shape)}"


def note_of(case: OpCase, variant: Variant, dtype: torch.dtype, n: Any, where: Mapping[str, Any]) -> str:
    return f"{case.name}, {variant.desc}, {dtype}, {n}, {where}"


def agrees(
    e: Emulator,
    case: OpCase,
    variant: Variant,
    dtype: torch.dtype,
    n: int | Sequence[int],
    seed: int = 0,
    *,
    others: Sequence[Any] = (),
    guard: bool = False,
    watch: bool = False,
    change: Callable[[dict[str, Any]], None] | None = None,
    **where: Any,
) -> dict[str, Any]:
    """Runs the emulated kernels and the reference on equal arguments and compares every bit.

    Args:
        others: backends that must agree as well.
        guard: the kernels' tensors end at unmapped pages, and a races build knows of every one of them.
        watch: a races build knows at least of what a launch is given.
        change: the arguments, before all.
    """
    args, kwargs = case.make("cpu", dtype, n, seed, **variant.options, **where)
    named = case.named(args, kwargs)
    if change is not None:
        change(named)
    wanted = clone(named)
    inputs = {k: v for k, v in clone(named).items() if k not in case.mutates}
    mine = guarded(e, named) if guard else clone(named)
    note = note_of(case, variant, dtype, n, where)
    function = getattr(emulated.backend(watched=(guard or watch) and e.instrumented), case.name)
    args, kwargs = case.split(mine)
    function(*args, **kwargs)
    args, kwargs = case.split(wanted)
    case.reference(*args, **kwargs)
    same = assert_values if guard or not variant.exact else assert_same
    same(mine, wanted, note, variant.exact)
    same({k: v for k, v in mine.items() if k in inputs}, inputs, note + ", a source")
    for other in others:
        theirs = clone(named)
        args, kwargs = case.split(theirs)
        getattr(other, case.name)(*args, **kwargs)
        same(mine, theirs, f"{note}, {other.name}", variant.exact)
    result = clone(mine)
    if guard:
        e.free()
    return result


@contextlib.contextmanager
def setting(e: Emulator, order: str = "ascending", width: int = 4) -> Iterator[None]:
    """An order of threads and a vector width."""
    e.set(**ORDERS[order], compute_capability=WIDTHS[width])
    try:
        yield
    finally:
        e.set(**ORDERS["ascending"], compute_capability=9)


# ---------------------------------------------------------------------------------- many at a time


def check_cases(e: Emulator, sizes: Sequence[int], width: int, every: int = 1, chunks: int = 300) -> None:
    """Every case, variant and dtype, or each ``every``-th; orders of threads and alignments take turns."""
    orders = list(ORDERS)
    jobs = [(c, v, d) for c in CASES for v in c.variants for d in c.dtypes]
    for i, (case, variant, dtype) in enumerate(jobs):
        if i % every == width // 4 % every:
            n = chunks if case.name == "finish_" else list(sizes)
            with setting(e, orders[(i + width) % 4], width):
                agrees(e, case, variant, dtype, n, i, guard=True, shift=i % 4)


def check_orders(e: Emulator, sizes: Sequence[int]) -> None:
    """The usual variants and those with everything in them in each order of threads."""
    for case in CASES:
        some = [case.variants[0], *(v for v in case.variants if "every" in v.desc or "three" in v.desc)]
        for variant in some:
            for width in WIDTHS:
                for order in ORDERS:
                    n = 1100 if case.name == "finish_" else list(sizes)
                    with setting(e, order, width):
                        agrees(e, case, variant, case.dtypes[0], n, guard=True)


def check_tables(e: Emulator, small: int, large: int) -> None:
    """Every kernel with words by value, in both sizes of tables, and on the device.

    Args:
        small: words that are too many for the small table by value.
        large: words that are too many for any.
    """
    e.set(unknown_memory=1)  # pages around thousands of tensors would take a minute
    for width in WIDTHS:
        with setting(e, "descending", width):
            _gather_tables(e, (40, small, large))
            _group_tables(e, (small, large))
    e.set(unknown_memory=0)


def _gather_tables(e: Emulator, counts: Sequence[int]) -> None:
    for count in counts:
        for buffer_dtype in (F32, F64):
            for norm_type in (None, 1.0, 2.0, math.inf):
                states = "ab-okp" + "-" * (count // 20)
                options = {"states": states, "buffer_dtype": buffer_dtype, "weight": 0.3}
                options |= {"norm_type": norm_type} if norm_type else {"partials": False}
                variant = Variant("a long table", options)
                sizes = [1 + k % 3 if k % len(states) < 6 else 0 for k in range(count)]
                agrees(e, BY_NAME["gather_"], variant, F32, sizes, watch=True)


def _group_tables(e: Emulator, counts: Sequence[int]) -> None:
    for count in counts:
        rows = -(-count // 11)
        for dtype in (F32, F64):
            for name, row in (("adam_", {"weight_decay": 0.1}), ("sgd_", {"momentum": 0.9})):
                variant = Variant("many groups", {"rows": [{**row, "lr": 0.01 * k} for k in range(rows)]})
                agrees(e, BY_NAME[name], variant, dtype, [3 + k % 5 for k in range(rows)], watch=True)

        def more_groups(named: dict[str, Any], rows: int = rows) -> None:
            named["hyper"] = named["hyper"].repeat(rows, 1)
            named["group"] = (named["group"] * 7) % len(named["hyper"])

        for variant in BY_NAME["finish_"].variants:
            if variant.desc in ("one group", "3-norm"):
                agrees(e, BY_NAME["finish_"], variant, F64, 5, watch=True, change=more_groups)


def check_long_tables(e: Emulator, dtype: str = "float32") -> None:
    """More tensors than a launch takes, of 0 to 9000 elements, partials NaN before."""
    sizes = [(k * 1237) % 9001 for k in range(40)]
    for width in WIDTHS:
        with setting(e, "random", width):
            for case in CASES:
                for variant in case.variants if case.name == "gather_" else case.variants[:1]:
                    n = 1100 if case.name == "finish_" else sizes
                    of = getattr(torch, dtype) if getattr(torch, dtype) in case.dtypes else case.dtypes[0]
                    got = agrees(e, case, variant, of, n, guard=True)
                    if case.name in ("gather_", "norm_") and got["partials"] is not None:
                        assert not got["partials"].isnan().any()


def assert_all_launched(library: Path, names: set[str]) -> None:
    """Every kernel that the library has was launched."""
    wanted = kernels_in(library)
    assert len(wanted) > 50 and not wanted - names, f"of {len(wanted)} kernels, without {wanted - names}"


# ----------------------------------------------------------------------------------- other processes


class Result(NamedTuple):
    """What a job left."""

    code: int  # negative: the signal that ended it
    text: str
    launched: list[str]  # the kernels

    @property
    def passed(self) -> bool:
        return self.code == 0


def run(
    jobs: Sequence[tuple[str, Path, str, Mapping[str, Any]]], sanitize: bool = False
) -> dict[str, Result]:
    """Runs jobs, each in a process of its own."""
    environment = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "ASAN_OPTIONS")}
    if sanitize:
        environment["LD_PRELOAD"] = " ".join(_library_file(n) for n in ("libasan.so", "libubsan.so"))
        environment["ASAN_OPTIONS"] = "detect_leaks=0:detect_odr_violation=0"
        environment["UBSAN_OPTIONS"] = "print_stacktrace=1"
    text = json.dumps([[name, str(path), check, dict(options)] for name, path, check, options in jobs])
    done = subprocess.run(
        [sys.executable, "-m", "tests.cuda_checks"],
        input=text,
        capture_output=True,
        text=True,
        cwd=emulated.ROOT,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    return {name: Result(*result) for name, result in results.items()}


def _library_file(name: str) -> str:
    compiler = emulated.build.CXX
    return subprocess.run(
        [*compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()


def _child(path: str, check: str, options: Mapping[str, Any]) -> None:
    faulthandler.disable()  # the emulation's report of a fault is the better one
    torch.set_num_threads(1)
    e = emulated.load(Path(path))
    e.set(allow_early_exit=0, vector_align=2)  # stricter than CUDA and than x86: 32-byte accesses are, too
    functions = {**vars(sys.modules["tests.cuda_traps"]), **vars(sys.modules["tests.cuda_checks"])}
    functions[check](e, **options)
    print(LAUNCHED + json.dumps(sorted(set(launched(e)))))


def _start(job: Sequence[Any], limit: int) -> tuple[int, Any]:
    output = tempfile.TemporaryFile()  # noqa: SIM115
    pid = os.fork()
    if pid:
        return pid, output
    code = 1
    try:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        signal.alarm(limit)
        _child(*job[1:])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return 0, output


def _main() -> None:
    sys.modules["tests.cuda_checks"] = sys.modules["__main__"]  # one module, not two
    importlib.import_module("tests.cuda_traps")

    jobs = json.loads(sys.stdin.read())
    running: dict[int, tuple[str, Any]] = {}
    results: dict[str, tuple[int, str, list[str]]] = {}
    at_once = len(os.sched_getaffinity(0))
    while jobs or running:
        while jobs and len(running) < at_once:
            job = jobs.pop(0)
            pid, output = _start(job, 300)
            running[pid] = job[0], output
        pid, status = os.wait()
        name, output = running.pop(pid)
        output.seek(0)
        text, _, names = output.read().decode(errors="replace").partition(LAUNCHED)
        results[name] = os.waitstatus_to_exitcode(status), text[-6000:], json.loads(names or "[]")
    print(json.dumps(results))


if __name__ == "__main__":
    _main()
