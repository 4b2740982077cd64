"""The CUDA kernels' machine code, looked at without a GPU: see benchmarks/static_proof.py.

The gate has to pass on csrc, and has to catch faults that are planted in copies of it.
"""

import json
import re
import shutil
from pathlib import Path

import pytest

from benchmarks import sass, static_proof, toolkit

CSRC = static_proof.ROOT / "csrc"
RECORDED = static_proof.RESULTS / "static-proof.json"

pytestmark = [
    pytest.mark.skipif(not (CSRC / "gather.cu").exists(), reason="needs the source tree"),
    pytest.mark.skipif(
        toolkit.find("nvcc") is None or toolkit.find("nvdisasm") is None,
        reason=f"needs nvcc and nvdisasm: {toolkit.PACKAGES}",
    ),
]


@pytest.fixture(scope="module")
def compiled():
    return static_proof.compile_all(CSRC)


@pytest.mark.slow
def test_no_kernel_has_a_fault(compiled):
    assert static_proof.faults(compiled) == []


@pytest.mark.slow
def test_every_kernel_is_looked_at(compiled):
    # One entry function per instantiation, and of both vector widths one is empty.
    by_arch = {arch: 0 for arch in static_proof.ARCHS}
    for one in compiled:
        assert one.kernels, one
        by_arch[one.arch] += sum(not static_proof.is_empty(kernel) for kernel in one.kernels)
    assert len(set(by_arch.values())) == 1 and by_arch[80] > 40
    for one in compiled:
        for kernel in one.kernels:
            assert static_proof.is_empty(kernel) == (kernel.registers <= 4 and not kernel.accesses)


@pytest.mark.slow
def test_float32_bodies_move_no_byte_twice(compiled):
    rows = static_proof.rows_of(compiled)
    told = [value for row in rows for value in row["bytes_per_element"].values()]
    assert len(told) > 100
    assert all(value["moved"] == value["needed"] for value in told)


@pytest.mark.slow
def test_recorded_table_is_that_of_the_code(compiled):
    recorded = json.loads(RECORDED.read_text())
    if recorded["toolkit"] != toolkit.version():
        pytest.skip(f"recorded with nvcc {recorded['toolkit']}, this is {toolkit.version()}")
    found = static_proof.result_of(compiled)
    assert found == recorded, "run `python -m benchmarks.static_proof`"
    assert RECORDED.with_suffix(".md").read_text() == static_proof.markdown(found)


# Planted faults. scale.cu and gather.cu compile quickly and have the loops of all kernels.


def planted(tmp_path, file, pattern, replacement, count=0):
    """A copy of csrc with one substitution."""
    folder = tmp_path / "csrc"
    shutil.copytree(CSRC, folder, ignore=shutil.ignore_patterns("cpu"))
    text = (folder / file).read_text()
    changed, n = re.subn(pattern, replacement, text, count=count)
    assert n > 0, f"{file} has no {pattern}"
    (folder / file).write_text(changed)
    return folder


def faults_in(folder, name, arch, flags=static_proof.FLAGS):
    one = static_proof.compile_one(folder / name, arch, flags)
    return "\n".join(static_proof.faults([one]))


@pytest.mark.parametrize("arch", static_proof.ARCHS)
def test_clean_copy_has_no_fault(tmp_path, arch):
    shutil.copytree(CSRC, tmp_path / "csrc", ignore=shutil.ignore_patterns("cpu"))
    assert faults_in(tmp_path / "csrc", "scale.cu", arch) == ""


@pytest.mark.parametrize("arch", static_proof.ARCHS)
def test_spill_is_caught(tmp_path, arch):
    # A cap on registers; it is ignored where a kernel has launch bounds.
    folder = planted(tmp_path, "scale.cu", r"__launch_bounds__\(threads\(kVector\)\)", "")
    found = faults_in(folder, "scale.cu", arch, (*static_proof.FLAGS, "-maxrregcount=24"))
    assert "spills" in found and "stack frame" in found and "accesses to local memory" in found


@pytest.mark.parametrize("arch", static_proof.ARCHS)
def test_scalar_body_is_caught(tmp_path, arch):
    folder = planted(tmp_path, "scale.cu", r"const bool whole = ", "const bool whole = false && ")
    assert "body loops missing" in faults_in(folder, "scale.cu", arch)


@pytest.mark.parametrize(
    ("file", "pattern", "replacement"),
    [
        (
            "rows.h",
            r"__stcs\((global\(reinterpret_cast<)uint4(\*>\(to\)\)), (make_uint4\(.*\))\)",
            r"*(\1uint4\2) = \3",
        ),
        (
            "rows.h",
            r"__stcs\(global\(reinterpret_cast<uint4\*>\(to\)\), make_uint4\(.*\)\)",
            "for (int i = 0; i < 4; ++i) __stcs(global(reinterpret_cast<unsigned*>(to)) + i, words[i])",
        ),
    ],
    ids=["plain", "split"],
)
def test_store_that_is_not_one_streaming_vector_is_caught(tmp_path, file, pattern, replacement):
    found = faults_in(planted(tmp_path, file, pattern, replacement), "scale.cu", 90)
    assert "plain vector stores in body loops" in found or "body loops missing" in found


@pytest.mark.parametrize("arch", static_proof.ARCHS)
def test_generic_addresses_are_caught(tmp_path, arch):
    folder = planted(tmp_path, "rows.h", r"__builtin_assume\(__isGlobal\(pointer\)\);", "")
    assert "generic accesses" in faults_in(folder, "scale.cu", arch)


def test_lost_unrolling_is_caught(tmp_path):
    folder = planted(tmp_path, "scale.cu", r"row \+= kUnrolled", "row += 1")
    folder_text = (folder / "scale.cu").read_text()
    one_row = re.sub(r"constexpr int kUnrolled = [^;]*;", "constexpr int kUnrolled = 1;", folder_text)
    (folder / "scale.cu").write_text(one_row)
    assert "body loops missing" in faults_in(folder, "scale.cu", 80)


def test_fused_multiply_add_is_caught():
    flags = tuple("-fmad=true" if flag == "-fmad=false" else flag for flag in static_proof.FLAGS)
    assert "fused float32 multiply-adds in PTX" in faults_in(CSRC, "sgd.cu", 80, flags)


def test_float64_squares_are_fused_and_float32_is_not():
    ptx = static_proof.compile_one(CSRC / "norm.cu", 80).ptx
    assert "fma.rn.f64" in ptx and static_proof.fused_float32(ptx) == 0
    assert static_proof.fused_float32("fma.rn.f32 %f1;\nfma.rn.ftz.f32 x;\nfma.rn.f32x2 y; fma.rn.f64 z") == 3


# The parts of the gate.


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "arch", "expected"),
    [
        (48, 0, 128, 90, (10, 1280)),
        (32, 0, 128, 80, (16, 2048)),
        (33, 0, 128, 80, (12, 1536)),  # given out in units of 8 per thread
        (72, 16, 64, 100, (14, 896)),
        (255, 0, 128, 90, (2, 256)),
        (32, 0, 64, 100, (32, 2048)),
        (16, 0, 32, 90, (32, 1024)),  # 32 blocks at most
        (32, 100 * 1024, 128, 90, (2, 256)),
        (40, 257, 1024, 80, (1, 1024)),
    ],
)
def test_occupancy(registers, shared, threads, arch, expected):
    assert static_proof.occupancy(registers, shared, threads, arch) == expected


LISTING = """\
//--------------------- .text.kernel --------------------------
.text.kernel:
        /*0000*/                   LDG.E R0, desc[UR4][R2.64] ;
.L_x_4:
        /*0010*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
        /*0020*/                   BSSY B0, `(.L_x_2) ;
        /*0030*/              @!P1 BRA `(.L_x_3) ;
        /*0040*/               @P3 LDG.E.EF.128 R4, desc[UR6][R36.64] ;
        /*0050*/                   BSYNC B0 ;
.L_x_2:
        /*0060*/                   STG.E.EF.128 desc[UR6][R36.64], R4 ;
        /*0070*/               @P0 BRA `(.L_x_1) ;
        /*0080*/               @P2 BRA `(.L_x_4) ;
        /*0090*/                   STG.E.ENL2.256 desc[UR6][R36.64], R4, R8 ;
        /*00a0*/                   EXIT ;
.L_x_3:
        /*00b0*/                   LD.E.U16 R4, desc[UR6][R36.64] ;
        /*00c0*/                   LDL.64 R8, [R1] ;
        /*00d0*/                   BRA `(.L_x_2) ;
.L_x_5:
        /*00e0*/                   BRA `(.L_x_5) ;
"""
REPORT = """\
ptxas info    : Compiling entry function 'kernel' for 'sm_90'
ptxas info    : Function properties for kernel
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 32 bytes smem
"""


def test_loops_are_found_with_blocks_that_lie_out_of_line():
    (kernel,) = sass.kernels_of(REPORT, LISTING)
    assert (kernel.registers, kernel.stack, kernel.spills, kernel.shared) == (40, 8, 28, 32)
    assert kernel.accesses == {
        ("global", False): 2,
        ("global", True): 2,
        ("generic", False): 1,
        ("local", False): 1,
    }
    (loop,) = kernel.loops  # the inner one; the outer one and the padding at the end do not count
    assert loop.address == 0x20
    assert loop.loads == {16: 1, 2: 1} and loop.stores == {16: 1} and loop.streaming_stores == 1


def test_kernel_without_a_listing_is_an_error():
    with pytest.raises(RuntimeError, match="lists no code"):
        sass.kernels_of(REPORT.replace("'kernel'", "'other'"), LISTING)


def test_tools_are_found_where_the_packages_put_them(monkeypatch, tmp_path):
    folder = tmp_path / "nvidia/cu13/bin"
    folder.mkdir(parents=True)
    (folder / "nvcc").touch()
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(toolkit.sysconfig, "get_path", lambda name: str(tmp_path))
    assert toolkit.find.__wrapped__("nvcc") == str(folder / "nvcc")
    assert toolkit.find.__wrapped__("nvdisasm") is None
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    (tmp_path / "home/bin").mkdir(parents=True)
    Path(tmp_path / "home/bin/nvcc").touch()
    assert toolkit.find.__wrapped__("nvcc") == str(tmp_path / "home/bin/nvcc")
