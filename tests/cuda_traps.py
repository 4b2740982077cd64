"""Checks for what is easily got wrong in the kernels, and faults to plant, each of which a check must see.

A fault is a change of the sources' text, in a copy; only the kernel file it concerns is compiled anew. The
checks run in processes of their own (tests/cuda_checks.py): ``check(emulator)`` raises, or the process dies.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastaccum.layout import CHUNK, STRAND, STRANDS_PER_CHUNK
from fastaccum.tables import PRESENT, TAGS
from tests import emulated
from tests.bits import different
from tests.cases import BY_NAME, Variant
from tests.cuda_checks import BF16, F32, F64, WIDTHS, agrees, setting
from tests.cuda_on_cpu import build
from tests.cuda_on_cpu.emulator import Emulator

INF = math.inf

# ------------------------------------------------------------------------------------------- planting


class Fault(NamedTuple):
    """A change of the sources that a check must see.

    Attributes:
        check: the function that must fail, and what it says then.
        kernel: the file to compile anew.
        changes: per file: texts and their replacements, each of which must be there.
        mode: in which it is seen.
        slim: leave out what the check does not run, to compile less.
        first: text before the kernel file.
    """

    check: str
    match: str
    kernel: str
    changes: Mapping[str, Sequence[tuple[str, str]]]
    mode: str = "plain"
    slim: bool = False
    first: str = ""


SLIM = {  # float32 buffers only
    "gather.cu": (
        "  if (args.buffer_dtype == DType::kFloat64) return run<double>(args, stream);\n",
        "",
    )
}


def planted(name: str, fault: Fault) -> Path:
    """The library with a fault in it."""
    slug = re.sub(r"\W+", "-", name)
    folder = build.BUILD / "faults" / slug
    folder.mkdir(parents=True, exist_ok=True)
    changes = {file: list(pairs) for file, pairs in fault.changes.items()}
    if fault.slim:
        changes.setdefault(fault.kernel, []).append(SLIM[fault.kernel])
    for path in (*(emulated.ROOT / "csrc").glob("*.h"), emulated.ROOT / "csrc" / fault.kernel):
        text = path.read_text()
        for old, new in changes.pop(path.name, ()):
            assert old in text, f"{name}: {path.name} has changed: there is no {old!r}"
            text = text.replace(old, new)
        if path.name == fault.kernel:
            text = fault.first + text
        target = folder / path.name
        if not target.exists() or target.read_text() != text:
            target.write_text(text)
    assert not changes, f"{name}: not compiled: {list(changes)}"
    # First: where objects share an inline function, the linker takes the first one's.
    others = [path for path in emulated.SOURCES if path.name != fault.kernel]
    return emulated.built([folder / fault.kernel, *others], fault.mode, f"faults/{slug}", 4080)


FAULTED = "invalid access"

FAULTS = {
    "01 a stale accumulator is added to": Fault(
        "check_stale_sums", "buffer differs", "gather.cu",
        {"gather.cu": [("if ((entry & kPresent) != 0) {", "if (terms.fresh.exists()) {")]}, slim=True,
    ),
    "01 a parameter without a gradient is updated": Fault(
        "check_absent_gradients", FAULTED, "sgd.cu",
        {"update.h": [("if ((grad & kAddressMask) == 0) return;", "")]},
    ),
    "02 the last chunk's partial is missing": Fault(
        "check_partials", "partials differs", "gather.cu",
        {"gather.cu": [
            ("sums.store(p.partials);", "if (blockIdx.x + 1 < gridDim.x) sums.store(p.partials);"),
        ]},
        slim=True,
    ),
    "02 a chunk without gradients keeps its old partial": Fault(
        "check_partials", "partials differs", "norm.cu",
        {"rows.h": [
            ("partials.sums[blockIdx.x] = fold<kNorm, kWarps>(joined);",
             "if (joined[0] != 0.0) partials.sums[blockIdx.x] = fold<kNorm, kWarps>(joined);"),
        ]},
    ),
    "02 a table by value loses a word": Fault(
        "check_partials", "buffer differs", "gather.cu",
        {"rows.h": [("(words.count) * sizeof(Entry)", "(words.count - 1) * sizeof(Entry)")]}, slim=True,
    ),
    "03 lanes fold in halves": Fault(
        "check_folds", "partials differs", "norm.cu",
        {"norm.h": [("join(x[2 * i], x[2 * i + 1])", "join(x[i], x[i + n / 2])")]},
    ),
    "03 a warp folds from the far end": Fault(
        "check_folds", "partials differs", "norm.cu",
        {"rows.h": [("(int distance = 1; distance < 32; distance *= 2)",
                     "(int distance = 16; distance > 0; distance /= 2)")]},
    ),
    "03 chunks fold from the far end": Fault(
        "check_folds", "group_norms differs", "finish.cu",
        {"finish.cu": [("(int distance = 1; distance < 32; distance *= 2)",
                        "(int distance = 16; distance > 0; distance /= 2)")]},
    ),
    "04 a product is fused with a sum": Fault(
        "check_contraction", "buffer differs", "gather.cu",
        {"gather.cu": [("? sum[j] + product :", "? std::fma(term[j], terms.weight, sum[j]) :")]}, slim=True,
        first="#include <cmath>\n",
    ),
    "04 a product is fused with a sum in sgd": Fault(
        "check_contraction", r"params\[0\] differs", "sgd.cu",
        {"sgd.h": [("param = param - g * lr;", "param = std::fma(-g, lr, param);")]},
        first="#include <cmath>\n",
    ),
    "05 bfloat16 is truncated": Fault(
        "check_rounding", "nearest even", "scale.cu",
        {"dtype.h": [("(u + 0x7fffu + ((u >> 16) & 1u)) >> 16", "u >> 16")]},
    ),
    "05 halves are rounded up": Fault(
        "check_rounding", "nearest even", "scale.cu",
        {"dtype.h": [("(u + 0x7fffu + ((u >> 16) & 1u)) >> 16", "(u + 0x8000u) >> 16")]},
    ),
    "05 denormals are flushed": Fault(
        "check_rounding", "nearest even", "scale.cu",
        {"scale.cu": [
            ("values[j] * factor;",
             "std::abs(values[j]) < real(1.17e-38) ? real(0) : values[j] * factor;"),
        ]},
        first="#include <cmath>\n",
    ),
    "06 a misaligned gradient is read in vectors": Fault(
        "check_misaligned", r"misaligned 16-byte read.* of buffer 'tensors", "norm.cu",
        {"rows.h": [("reinterpret_cast<std::uintptr_t>(data) % (size * kVector) == 0", "true")]},
        mode="races",
    ),
    "06 a table is read beyond its end": Fault(
        "check_misaligned", r"out of bounds: read of 4 bytes .*launch_norm\[1\]", "norm.cu",
        {"rows.h": [("layout.strand_segment[place.strand]", "layout.strand_segment[place.strand + 1]")]},
        mode="races",
    ),
    "07 a flag is read and written in one launch": Fault(
        "check_flags", r"data race: .* of buffer 'skip'.* at update.h:\d+, unordered .* at update.h:\d+",
        "sgd.cu",
        {"update.h": [
            ("if (place.segment < 0 || *args.skip != 0) return;",
             "if (place.segment < 0 || *args.skip != 0) return;\n"
             "    if (place.first == 0) *const_cast<std::int32_t*>(args.skip) = 0;"),
        ]}, mode="races",
    ),
    "08 a skipped update writes": Fault(
        "check_skip", FAULTED, "sgd.cu",
        {"update.h": [("if (place.segment < 0 || *args.skip != 0) return;",
                       "if (place.segment < 0) return;")]},
    ),
    "08 a skipped window writes its step counts back": Fault(
        "check_skip", FAULTED, "finish.cu",
        {"finish.cu": [("if (!skip) args.steps[slot] = step;", "args.steps[slot] = step;")]},
    ),
    "09 the largest drops a NaN": Fault(
        "check_nan", "NaN .* lost", "norm.cu",
        {"norm.h": [("return (a > b || a != a) ? a : b;", "return a > b ? a : b;")]},
    ),
    "10 a buffer's index overflows": Fault(
        "check_large_buffer", FAULTED, "gather.cu",
        {"gather.cu": [("place.strand * kStrand * size_of",
                        "static_cast<int>(static_cast<unsigned>(place.strand) * kStrand) * size_of")]},
        slim=True,
    ),
    "10 a tensor's index overflows": Fault(
        "check_large_tensors", FAULTED, "scale.cu",
        {"rows.h": [("+ from * size_of(dtype)", "+ static_cast<int>(from) * size_of(dtype)")]},
    ),
    "10 a tensor's index overflows in bytes": Fault(
        "check_large_tensors", FAULTED, "scale.cu",
        {"rows.h": [("+ from * size_of(dtype)", "+ static_cast<std::uint32_t>(from * size_of(dtype))")]},
    ),
    "10 a segment's offset overflows": Fault(
        "check_large_tensors", "place.from >= 0", "scale.cu",
        {"rows.h": [("place.strand * kStrand - segment.offset",
                     "static_cast<std::int32_t>(place.strand * kStrand - segment.offset)")]},
    ),
}  # fmt: skip


# --------------------------------------------------------------------------------------- 1: no gradient


def check_stale_sums(e: Emulator) -> None:
    """Segments without gradient: the buffer's NaN enters neither sum nor norm."""
    sizes = [600, 9000, 0, 33, 8192, 511, 8193, 700]
    for width, norm_type in itertools.product(WIDTHS, (1.0, 2.0, INF)):
        for states in ("-o-", "o--a", "ab-okp", "k-o"):
            variant = Variant(f"NaN around {states}", {"states": states, "norm_type": norm_type})
            with setting(e, "random", width):
                agrees(e, BY_NAME["gather_"], variant, F32, sizes, guard=True)


def absent(named: dict[str, Any]) -> None:
    """Leaves every third parameter out of an update."""
    lists = [name for name, value in named.items() if isinstance(value, list)]
    here = [k for k in range(len(named["params"])) if k % 3]
    for name in lists:
        named[name] = [named[name][k] for k in here] if named[name] else []
    for name in ("index", "group", "row"):
        named[name] = named[name][here]


def check_absent_gradients(e: Emulator) -> None:
    """Every third parameter without gradient stays as it is."""
    for width, name, dtype in itertools.product(WIDTHS, ("adam_", "sgd_"), (F32, F64)):
        case = BY_NAME[name]
        for variant in (case.variants[0], Variant("copies", {"master": True, "copies": BF16})):
            with setting(e, "random", width):
                agrees(e, case, variant, dtype, [600, 9000, 0, 33, 8192, 511, 8193], change=absent)


# ------------------------------------------------------------------------------- 2 to 4: sums and rounding


def check_partials(e: Emulator) -> None:
    """Every chunk's partial is written, also those without gradient; all were NaN."""
    sizes = [9000, *((k * 1237) % 9001 for k in range(41))]  # the last one counts
    for width, norm_type in itertools.product(WIDTHS, (1.0, 2.0, INF)):
        with setting(e, "descending", width):
            variant = Variant("partials", {"norm_type": norm_type, "absent": True})
            got = agrees(e, BY_NAME["norm_"], variant, F32, sizes)
            assert not got["partials"].isnan().any()
            variant = Variant("partials", {"norm_type": norm_type, "states": "-abo"})
            got = agrees(e, BY_NAME["gather_"], variant, F32, sizes)
            assert not got["partials"].isnan().any()


def check_folds(e: Emulator) -> None:
    """A wrong fold shows in one chunk of five: there are more than 64."""
    for width in WIDTHS:
        with setting(e, "ascending", width):
            for name in ("norm_", "gather_"):
                got = agrees(e, BY_NAME[name], Variant("folds"), F32, [300_007, 8192, 5, 250_000])
                assert got["partials"].shape[1] > 64
            for seed in range(24):  # nor does every sum of partials show it
                variant = Variant("folds", {"max_norm": (0.5, 2.0)})
                agrees(e, BY_NAME["finish_"], variant, F64, 4000 + seed, seed)


def check_contraction(e: Emulator) -> None:
    """No product is fused with a sum."""
    for width in WIDTHS:
        with setting(e, "ascending", width):
            variant = Variant("weights", {"states": "ab", "weight": 0.3, "kept_weight": 0.7})
            agrees(e, BY_NAME["gather_"], variant, F32, [9000, 8192, 33])
            agrees(e, BY_NAME["adam_"], BY_NAME["adam_"].variants[0], F32, [9000, 8192, 33])
            agrees(e, BY_NAME["sgd_"], BY_NAME["sgd_"].variants[0], F32, [9000, 8192, 33])


# ---------------------------------------------------------------------------------------- 5: narrowing


def check_rounding(e: Emulator) -> None:
    """Every upper half of a float32, around and at the middle between two bfloat16 values."""
    upper = torch.arange(1 << 16, dtype=torch.int64)
    for lower, (shift, width) in itertools.product((0x7FFF, 0x8000, 0x8001, 0), ((0, 4), (0, 8), (1, 4))):
        bits = (upper << 16 | lower).to(torch.int64)
        source = (bits - (bits >> 31 << 32)).to(torch.int32).view(F32)
        even = (bits + 0x7FFF + (upper & 1)) >> 16 & 0xFFFF
        wanted = (even - (even >> 15 << 16)).to(torch.int16).view(BF16)
        memory = torch.zeros(len(source) + 64, dtype=F32)
        moved = memory[32 + shift : 32 + shift + len(source)].copy_(source)
        moved.view(torch.int32).copy_(source.view(torch.int32))
        out = torch.zeros(len(source), dtype=BF16)
        with setting(e, "ascending", width):
            one, index = torch.ones(1, dtype=F64), torch.zeros(1, dtype=torch.int64)
            emulated.backend().scale_into_([out], [moved], one, index)
        nan = source.isnan()
        assert out[nan].isnan().all(), "a NaN is none any more"
        bad = different(out[~nan], wanted[~nan])
        assert not bad.any(), f"{int(bad.sum())} values are not rounded to nearest even, lower {lower:#x}"


# ----------------------------------------------------------------------------------- 6, 7: every access


def check_misaligned(e: Emulator) -> None:
    """Gradients that are views one element on."""
    assert e.instrumented
    for width, shift in itertools.product(WIDTHS, (1, 2, 3)):
        for name, dtype in itertools.product(("norm_", "gather_", "sgd_", "scale_"), (F32, BF16)):
            case = BY_NAME[name]
            with setting(e, "random", width):
                agrees(e, case, case.variants[0], dtype, [1100, 513], guard=True, shift=shift)


def check_flags(e: Emulator) -> None:
    """What a launch decides by is not what it writes."""
    assert e.instrumented
    for order in ("ascending", "random"):
        for name in ("sgd_", "adam_"):
            case = BY_NAME[name]
            with setting(e, order):
                agrees(e, case, case.variants[0], F32, [9000, 600, 33], guard=True)


# ---------------------------------------------------------------------------------------- 8: skipping

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_NONE, _NORESERVE = 0, 0x4000


def pages(count: int, dtype: torch.dtype, writable: Sequence[tuple[int, int]]) -> Tensor:
    """A tensor on pages that cannot be used but for ranges of elements; never freed."""
    size = count * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    address = _libc.mmap(None, size + mmap.PAGESIZE, _NONE, flags, -1, 0)
    assert address != ctypes.c_void_p(-1).value, "no address space"
    for begin, end in writable:
        first = (address + begin * dtype.itemsize) // mmap.PAGESIZE * mmap.PAGESIZE
        protect(first, address + end * dtype.itemsize - first, mmap.PROT_READ | mmap.PROT_WRITE)
    memory = (ctypes.c_char * size).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


def protect(address: int, size: int, how: int) -> None:
    assert _libc.mprotect(address, size, how) == 0, ctypes.get_errno()


def read_only(tensor: Tensor) -> Tensor:
    """A copy on pages that may only be read."""
    if not tensor.numel():
        return tensor
    copy = pages(tensor.numel(), tensor.dtype, [(0, tensor.numel())]).copy_(tensor.flatten())
    protect(copy.data_ptr(), copy.nbytes, mmap.PROT_READ)
    return copy.view(tensor.shape)


def check_skip(e: Emulator) -> None:
    """A window with a NaN: parameters, states, copies and step counts lie on pages that cannot be written."""
    sizes = [600, 9000, 0, 33, 8192]
    for width, name in itertools.product(WIDTHS, ("sgd_", "adam_")):
        with setting(e, "random", width):
            finish, case = BY_NAME["finish_"], BY_NAME[name]
            named = finish.named(*finish.make("cpu", F64, 5, 0, planted=math.nan, max_norm=(0.5, 2.0)))
            named["steps"] = read_only(named["steps"])
            args, kwargs = finish.split(named)
            emulated.backend().finish_(*args, **kwargs)
            assert (named["skip"].item(), named["skipped"].item()) == (1, 42)

            update = case.named(*case.make("cpu", F32, sizes, 0, master=True, copies=BF16))
            update["skip"] = named["skip"]
            update["factor"] = named["factor"]
            for grad in update["grads"]:
                grad.fill_(math.nan)
            for argument in update:
                if isinstance(update[argument], list) and argument != "grads":
                    update[argument] = [read_only(t) for t in update[argument]]
            args, kwargs = case.split(update)
            getattr(emulated.backend(), name)(*args, **kwargs)


# ------------------------------------------------------------------------------------------- 9: NaN


def check_nan(e: Emulator) -> None:
    """A NaN anywhere makes the norm one, and the window is skipped."""
    sizes = [700, 9000, 33]
    norm, finish = BY_NAME["norm_"], BY_NAME["finish_"]
    for width, norm_type in itertools.product(WIDTHS, (INF, 2.0, 1.0)):
        for dtype, tensor in itertools.product((F32, BF16, F64), range(3)):
            for place in (0, sizes[tensor] // 2, sizes[tensor] - 1):
                with setting(e, "ascending", width):
                    named = norm.named(*norm.make("cpu", dtype, sizes, 0, norm_type=norm_type))
                    named["tensors"][tensor][place] = math.nan
                    backend = emulated.backend()
                    args, kwargs = norm.split(named)
                    backend.norm_(*args, **kwargs)
                    chunks = named["partials"].shape[1]
                    end = finish.named(*finish.make("cpu", F64, chunks, 0, norm_type=norm_type))
                    end["partials"] = named["partials"]
                    args, kwargs = finish.split(end)
                    backend.finish_(*args, **kwargs)
                where = f"{width}, {norm_type}, {dtype}, element {place} of tensor {tensor}"
                assert end["norm"].isnan() and end["skip"].item() == 1, f"the NaN is lost: {where}"


# ------------------------------------------------------------------------------------- 10: large indices

LARGE = 1 << 31
PART = CHUNK + 700  # elements beyond


def _words(*values: int) -> Tensor:
    return torch.tensor([v - (1 << 64) if v >> 63 else v for v in values], dtype=torch.int64)


def _entry(tensor: Tensor) -> int:
    return tensor.data_ptr() | TAGS[tensor.dtype]


def _large(dtype: torch.dtype, values: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor of more than 2^31 elements, most of which may not be touched, and what may."""
    tensor = pages(LARGE + PART, dtype, [(LARGE, LARGE + PART)])
    return tensor, tensor[LARGE:].copy_(values)


def check_large_buffer(e: Emulator) -> None:
    """A flat buffer, a segment and a gradient of more than 2^31 elements."""
    chunks = -(-(LARGE + PART) // CHUNK)
    old, new = torch.randn(PART), torch.randn(PART)
    buffer, sums = _large(F32, old)
    fresh, grads = _large(BF16, new)
    strands = torch.full((chunks * STRANDS_PER_CHUNK,), -1, dtype=torch.int32)
    strands[LARGE // STRAND : -(-(LARGE + PART) // STRAND)] = 0
    # The launcher wants the buffer to reach into the last chunk, which it does.
    segments = torch.tensor([[0, LARGE + PART]])
    wanted = old + grads.float()
    with setting(e, "ascending", 8):  # fewer threads
        torch.ops.fastaccum.launch_gather(
            buffer, None, strands, segments, _words(_entry(fresh) | PRESENT), None, None, None, 2.0
        )
    assert torch.equal(sums, wanted)


def check_large_tensors(e: Emulator) -> None:
    """Tensors of more than 2^31 elements, of which a fake layout lets only the end be seen."""
    segments = torch.tensor([[-LARGE, LARGE + PART]])
    strands = torch.full((-(-PART // CHUNK) * STRANDS_PER_CHUNK,), -1, dtype=torch.int32)
    strands[: -(-PART // STRAND)] = 0
    ops, one = torch.ops.fastaccum, torch.ones(1, dtype=F64)
    for width, dtype in itertools.product(WIDTHS, (F32, BF16)):
        with setting(e, "ascending", width):
            values = torch.randn(PART)
            tensor, part = _large(dtype, values)
            before = part.clone()
            table = _words(_entry(tensor), _entry(tensor), 0)
            ops.launch_scale(strands, segments, table, torch.full((1,), 0.5, dtype=F64), INF)
            assert torch.equal(part, before * 0.5)

            partials = torch.full((2, len(strands) // STRANDS_PER_CHUNK), math.nan, dtype=F64)
            ops.launch_norm(partials, strands, segments, _words(_entry(tensor)), INF, None)
            assert partials[0].max() == part.abs().max() and not partials[1].any()

            param, updated = _large(F32, values)
            hyper = torch.tensor([0.1, *[0.0] * 9], dtype=F64).view(torch.int64)
            hyper[7] = torch.tensor([INF], dtype=F64).view(torch.int64)
            scalars = torch.tensor([[0.1, 1.0, 0.0, 0.1]], dtype=F64)
            ops.launch_sgd(
                strands, segments, _words(_entry(param), 0, 0, 0, 0, 0), _words(_entry(tensor)),
                torch.cat([hyper, torch.zeros(1, dtype=torch.int64)]), scalars, one,
                torch.zeros((), dtype=torch.int32), False,
            )  # fmt: skip
            step = torch.tensor(0.1, dtype=F32) * part.float()
            assert torch.equal(updated, values - step)
