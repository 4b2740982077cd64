"""Proves what can be proved about the CUDA kernels without a GPU, from their machine code.

    python -m benchmarks.static_proof [--check]

compiles csrc/*.cu for every architecture, disassembles and checks them, and writes the table
(benchmarks/results/static-proof.json and .md); --check writes nothing. The exit status is 1 if a kernel

* spills, has a stack frame or touches local memory;
* reads or writes through generic addresses (LD, ST), which are never 256 bits wide;
* has a body loop, the loop over a strand's whole rows, whose accesses are not exactly the vector accesses
  that unrolling times arrays gives: so a scalar or split access shows, and one that is done twice;
* writes in a body without the hint that the data will not be read again (on sm_80 and sm_90, where a
  plain vector store may be split as well);
* contains a fused float32 multiply-add in its PTX. (In float64 they are wanted, for exact squares.)
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import sass, toolkit

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
ARCHS = (80, 90, 100)
FLAGS = ("-std=c++20", "-fmad=false", "-O3")

# Per SM, from the CUDA programming guide: 64 Ki registers in four equal parts, given out to warps in
# units of 256; threads, blocks, shared memory (of which each block takes 1 KiB for itself).
REGISTERS, UNIT, PARTS = 65536, 256, 4
MAX_WARPS, MAX_BLOCKS = 64, 32
SHARED = {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024}
SHARED_PER_BLOCK = 1024

ADAM_VARIANTS, ADAM_AMSGRAD_VARIANTS = 2, 2  # weight decay decoupled or coupled
SGD_VARIANTS, SGD_MOMENTUM_VARIANTS = 2, 4  # decay or not; times nesterov or not


@dataclass
class Body:
    """A loop over whole rows: how many there are, and one's accesses {bytes: number}."""

    what: str
    copies: int
    loads: dict[int, int]
    stores: dict[int, int]
    elements: int = 0  # per thread and turn, where the bytes per element are worth telling
    moves: int = 0  # bytes per element that the operation cannot do without

    def key(self) -> tuple:
        return tuple(sorted(self.loads.items())), tuple(sorted(self.stores.items()))


def times(n: int, *widths: int) -> dict[int, int]:
    """n accesses of each width."""
    return {width: n * widths.count(width) for width in widths if n}


def bodies(name: str, arch: int) -> list[Body]:
    """What the body loops of a kernel must be: unrolling times arrays.

    `wide` is an access as wide as the architecture has; a float32 row takes one of these per thread, a
    16-bit row one of half the width, a float64 row two wide ones. A loop whose dtypes are run-time values
    holds an access for each; exactly one of them is executed.
    """
    vector = 8 if arch >= 100 else 4
    wide = 4 * vector
    half, quarter = wide // 2, wide // 4
    family, _, rest = name.partition("<")
    arguments = [word.strip() for word in rest.rstrip(">").split(",")]
    rows = 64 // wide  # in flight, of one array
    double_rows = max(rows // 2, 1)
    real_mixes = {"float": (half, wide), "double": (half, wide, wide, wide)}
    if family == "gather_kernel":
        real = arguments[0]
        mixed_rows = max((rows if real == "float" else double_rows) // 2, 1)
        mixed = real_mixes[real]
        mixed_body = Body("mixed dtypes", 1, times(2 * mixed_rows, *mixed), times(mixed_rows, *mixed))
        if real == "float":
            usual = Body("float32", 1, times(2 * rows, wide), times(rows, wide), rows * vector, 12)
        else:
            n = 2 * double_rows
            usual = Body("float64", 1, times(2 * n, wide), times(n, wide), double_rows * vector, 24)
        return [usual, mixed_body]
    if family == "norm_kernel":
        return [
            Body("float32 and narrower", 1, times(rows, half, wide), {}, rows * vector, 4),
            Body("float64", 1, times(2 * double_rows, wide), {}, double_rows * vector, 8),
        ]
    if family == "scale_kernel":
        one, two = times(rows, half, wide), times(double_rows, half, wide, wide, wide)
        return [
            Body("float32 and narrower", 1, one, one, rows * vector, 8),
            Body("with float64", 1, two, two),
        ]
    if family == "update_kernel":
        full = arguments[1] == "true"
        if arguments[0] == "AdamRule":
            kinds = [(ADAM_VARIANTS, 2, "")] + [(ADAM_AMSGRAD_VARIANTS, 3, ", amsgrad")] * full
        else:
            kinds = [(SGD_MOMENTUM_VARIANTS, 1, ", momentum"), (SGD_VARIANTS, 0, ", no momentum")]
        found = []
        for copies, states, note in kinds:
            loads, stores = states + 2, states + 1  # gradient and parameter; parameter
            moves = 4 * (loads + stores)
            found.append(
                Body(f"float32{note}", copies, times(loads, wide), times(stores, wide), vector, moves)
            )
            every = times(loads, half, wide)  # stores: also the copy in another dtype
            found.append(Body(f"mixed dtypes{note}", copies, every, every))
            if full:  # half a row's share at a time
                every = times(loads, quarter, half, wide)
                # nvcc 13.0 splits this loop's 256-bit float64 stores into two of 128 bits each.
                split = times(loads, quarter, half, half, half) if wide == 32 else every
                found.append(Body(f"with float64{note}", copies, every, split))
        return found
    if family in ("finish_kernel", "store_kernel"):
        return []
    raise KeyError(f"{name}: say in benchmarks/static_proof.py what its bodies must be")


def threads_of(name: str, arch: int) -> int:
    family = name.partition("<")[0]
    return {"finish_kernel": 1024, "store_kernel": 128}.get(family, 64 if arch >= 100 else 128)


def occupancy(registers: int, shared: int, threads: int, arch: int) -> tuple[int, int]:
    """Blocks and threads that an SM holds at a time."""
    warps = threads // 32
    per_warp = -(-registers * 32 // UNIT) * UNIT
    by_registers = (REGISTERS // PARTS // per_warp) * PARTS // warps
    by_shared = SHARED[arch] // (shared + SHARED_PER_BLOCK)
    blocks = min(by_registers, by_shared, MAX_WARPS // warps, MAX_BLOCKS)
    return blocks, blocks * threads


def is_empty(kernel: sass.Kernel) -> bool:
    """Whether this is the other vector width's kernel, whose body is left out."""
    width = 8 if kernel.arch == "sm_100" else 4
    found = re.search(r"_kernel<(?:[-\w]+, )*?([48])[,>]", kernel.name)
    return bool(found) and int(found[1]) != width and not kernel.accesses


@dataclass
class Compiled:
    """One file for one architecture."""

    source: str
    arch: int
    kernels: list[sass.Kernel] = field(default_factory=list)
    ptx: str = ""


def compile_one(source: Path, arch: int, flags: tuple[str, ...] = FLAGS) -> Compiled:
    """Compiles and disassembles; includes are looked for beside the source."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "out.cubin")
        command = [toolkit.need("nvcc"), *flags, f"-arch=sm_{arch}", "-cubin", "-Xptxas", "-v"]
        command += ["--keep", "--keep-dir", folder, "-o", str(cubin), str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{source.name} for sm_{arch}:\n{done.stdout}{done.stderr}")
        listing = subprocess.run(
            [toolkit.need("nvdisasm"), "-c", str(cubin)], capture_output=True, text=True, check=True
        ).stdout
        kernels = sass.kernels_of(done.stderr, listing)
        return Compiled(source.name, arch, kernels, Path(folder, f"{source.stem}.ptx").read_text())


def compile_all(folder: Path, archs: tuple[int, ...] = ARCHS) -> list[Compiled]:
    """Every csrc/*.cu for every architecture, as many at a time as there are cores."""
    # The longest first.
    sources = sorted(folder.glob("*.cu"), key=lambda path: -path.read_text().count("run_as"))
    jobs = list(itertools.product(sources, archs))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = list(pool.map(lambda job: compile_one(*job), jobs))
    return sorted(found, key=lambda one: (one.source, one.arch))


def body_loops(kernel: sass.Kernel) -> list[sass.Loop]:
    """The kernel's loops over whole rows.

    The loops for ragged and misaligned strands go element by element: only they touch single 16-bit
    elements. `finish` and `store` have no bodies.
    """
    if kernel.name.startswith(("finish_kernel", "store_kernel")):
        return []
    return [loop for loop in kernel.loops if 2 not in loop.loads and 2 not in loop.stores]


def faults_of(kernel: sass.Kernel, arch: int) -> list[str]:
    """What is wrong with one kernel."""
    faults = []
    if kernel.spills:
        faults.append(f"spills {kernel.spills} bytes")
    if kernel.stack:
        faults.append(f"has a stack frame of {kernel.stack} bytes")
    for space in ("local", "generic"):
        n = kernel.accesses[space, False] + kernel.accesses[space, True]
        if n:
            faults.append(f"{n} accesses to {space} memory" if space == "local" else f"{n} generic accesses")
    wanted: Counter = Counter()
    for body in bodies(kernel.name, arch):
        wanted[body.key()] += body.copies
    found = Counter(
        (tuple(sorted(loop.loads.items())), tuple(sorted(loop.stores.items()))) for loop in body_loops(kernel)
    )
    for (loads, stores), n in sorted((wanted - found).items()):
        faults.append(f"{n} body loops missing that load {shown(loads)} and store {shown(stores)}")
    for (loads, stores), n in sorted((found - wanted).items()):
        faults.append(f"{n} body loops too many that load {shown(loads)} and store {shown(stores)}")
    if arch < 100:
        plain = sum(sum(loop.stores.values()) - loop.streaming_stores for loop in body_loops(kernel))
        if plain:
            faults.append(f"{plain} plain vector stores in body loops")
    return [f"{kernel.name} on sm_{arch}: {fault}" for fault in faults]


def shown(accesses: tuple[tuple[int, int], ...]) -> str:
    return " + ".join(f"{n} x {8 * size} bit" for size, n in accesses) or "nothing"


def fused_float32(ptx: str) -> int:
    """Counts float32 multiply-adds that round once."""
    return len(re.findall(r"\bfma(?:\.\w+)*\.f32(?:x2)?\b", ptx))


def faults(compiled: list[Compiled]) -> list[str]:
    """What is wrong with all kernels."""
    found = []
    for one in compiled:
        for kernel in one.kernels:
            if not is_empty(kernel):
                found += faults_of(kernel, one.arch)
        if n := fused_float32(one.ptx):
            found.append(f"{one.source} for sm_{one.arch}: {n} fused float32 multiply-adds in PTX")
    return found


def widest(loops: list[sass.Loop], kind: str) -> int:
    return 8 * max((size for loop in loops for size in getattr(loop, kind)), default=0)


def rows_of(compiled: list[Compiled]) -> list[dict]:
    """The table."""
    table = []
    for one in compiled:
        for kernel in one.kernels:
            if is_empty(kernel):
                continue
            threads = threads_of(kernel.name, one.arch)
            blocks, resident = occupancy(kernel.registers, kernel.shared, threads, one.arch)
            loops = body_loops(kernel)
            moved, in_flight = {}, 0
            for body in bodies(kernel.name, one.arch):
                match = [
                    loop
                    for loop in loops
                    if body.elements
                    and (loop.loads, loop.stores) == (Counter(body.loads), Counter(body.stores))
                ]
                if match:
                    # Of a loop that knows several dtypes, what its widest accesses move.
                    counts = filter(None, (body.loads, body.stores))
                    size = sum(max(count) * count[max(count)] for count in counts)
                    moved[body.what] = {"moved": size / body.elements, "needed": body.moves}
                    if not in_flight:
                        in_flight = resident * max(body.loads) * body.loads[max(body.loads)] // 1024
            table.append(
                {
                    "source": one.source,
                    "kernel": kernel.name,
                    "arch": f"sm_{one.arch}",
                    "registers": kernel.registers,
                    "spill_bytes": kernel.spills,
                    "stack_bytes": kernel.stack,
                    "local_accesses": kernel.accesses["local", False] + kernel.accesses["local", True],
                    "generic_accesses": kernel.accesses["generic", False] + kernel.accesses["generic", True],
                    "shared_bytes": kernel.shared,
                    "threads_per_block": threads,
                    "blocks_per_sm": blocks,
                    "threads_per_sm": resident,
                    "in_flight_kib_per_sm": in_flight,
                    "widest_load_bits": widest(loops, "loads"),
                    "widest_store_bits": widest(loops, "stores"),
                    "body_loops": len(loops),
                    "bytes_per_element": moved,
                }
            )
    return sorted(table, key=lambda row: (row["source"], row["kernel"], int(row["arch"][3:])))


def markdown(result: dict) -> str:
    """The table for people: kernels that differ only in where their table lies are one line."""
    lines = [
        "# What the CUDA kernels' machine code says",
        "",
        f"`python -m benchmarks.static_proof` with nvcc {result['toolkit']}. No kernel spills, has a stack",
        "frame, or uses local or generic addresses; the body loops hold vector accesses only, as many as",
        "unrolling times arrays gives. Load, store: the widest access of a body in bits. Threads per SM:",
        "what registers and shared memory allow, of 2048. In flight: what these can have asked for at a time",
        "in the first body. Bytes per element: what a body moves, which is what the operation needs.",
        "",
        "The numbers in the names: the kind of sum (0 two-norm, 1 one-norm, 2 maximum, 3 another power, -1",
        "none), then the vector width in elements. `true` in an update: with float64 and amsgrad; in",
        "`finish`: for another power.",
        "",
        "| kernel | arch | registers | spills | load | store | blocks/SM | threads/SM | in flight, KiB/SM "
        "| bytes per element |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple, list[dict]] = {}
    for row in result["kernels"]:
        short = re.sub(r",? ?(ByValue<\d+>|OnDevice)", "", row["kernel"]).replace("<>", "")
        groups.setdefault((row["source"], short, row["arch"]), []).append(row)

    def span(rows: list[dict], key: str) -> str:
        values = sorted({row[key] for row in rows})
        return "-".join(map(str, dict.fromkeys((values[0], values[-1]))))

    for (_, short, arch), rows in groups.items():
        moved = "; ".join(f"{v['moved']:g} ({what})" for what, v in rows[0]["bytes_per_element"].items())
        keys = ("registers", "spill_bytes", "widest_load_bits", "widest_store_bits")
        keys += ("blocks_per_sm", "threads_per_sm", "in_flight_kib_per_sm")
        cells = [span(rows, key) for key in keys]
        lines.append("| " + " | ".join([f"`{short}`", arch, *cells, moved]) + " |")
    return "\n".join(lines) + "\n"


def result_of(compiled: list[Compiled]) -> dict:
    return {"toolkit": toolkit.version(), "flags": list(FLAGS), "kernels": rows_of(compiled)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.static_proof")
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--csrc", type=Path, default=ROOT / "csrc", help="the folder of the *.cu files")
    options = parser.parse_args(argv)
    compiled = compile_all(options.csrc)
    result = result_of(compiled)
    found = faults(compiled)
    print(markdown(result))
    for fault in found:
        print("FAULT:", fault)
    if not options.check and not found:
        (RESULTS / "static-proof.json").write_text(json.dumps(result, indent=1) + "\n")
        (RESULTS / "static-proof.md").write_text(markdown(result))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
