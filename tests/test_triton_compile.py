"""The Triton kernels compiled for GPUs that need not be there: nothing spills, accesses are wide."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests import triton_compile  # noqa: E402
from tests.triton_tables import HAS_TRITON  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="no Triton"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
]

# The float32 bodies, with the tensors that each reads and writes.
FP32 = {
    "gather fp32": (2, 1),
    "gather fp32 + norm": (2, 1),
    "gather fp32 + inf norm": (2, 1),
    "gather fp32 of two + norm": (3, 1),
    "norm fp32": (1, 0),
    "scale fp32": (1, 1),
    "adam fp32": (4, 3),
    "adam fp32, amsgrad": (5, 4),
    "adam fp32 + bf16 copy": (4, 3),
    "sgd fp32": (2, 1),
    "sgd fp32, momentum": (3, 2),
}
# Narrower, or with a loop over the rows in place of 16 unrolled ones.
OTHER = (
    "gather bf16 to fp32 + norm", "gather bf16 to bf16 + norm", "gather any dtype + norm", "norm fp32, p = 3",
    "finish", "finish, inf norm", "adam bf16", "adam any dtype but fp64",
)  # fmt: skip
each_target = pytest.mark.parametrize("target", triton_compile.TARGETS, ids="sm_{}".format)


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory):
    # Neither an old result nor one for another state of the sources.
    import triton

    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        yield


def check(kernel, target):
    build = triton_compile.build(kernel, target)
    assert build.spills == 0 and not re.search(r"\b(LDL|STL)\b", build.sass), build
    # Addresses from a table are known to be global.
    assert not re.search(r"\b(LD|ST)\.E", build.sass), build
    if "p = 3" not in kernel:  # there pow's own
        assert build.fused == 0, build
    return build


@pytest.mark.slow
@each_target
@pytest.mark.parametrize("kernel", FP32)
def test_float32_bodies_are_128_bits_wide(kernel, target):
    build, (reads, writes) = check(kernel, target), FP32[kernel]
    rows = 1 if "of two" in kernel else 16  # a loop, or unrolled
    assert build.widest_load == 128 and build.wide_loads == rows * reads, build
    if writes:
        assert build.widest_store == 128 and build.wide_stores == rows * writes, build


@pytest.mark.slow
@each_target
@pytest.mark.parametrize("kernel", OTHER)
def test_nothing_spills(kernel, target):
    check(kernel, target)


def test_only_the_promise_makes_accesses_wide():
    promised = triton_compile.build("sgd fp32", 90)
    other = triton_compile.build("sgd fp32, misaligned", 90)
    assert promised.widest_store == 128 and other.widest_store == 32 and other.spills == 0
    assert promised.row() == ("sgd fp32", "sm_90", promised.registers, 0, 128, 128)


def test_float32_is_divided_and_rooted_by_ieee():
    ptx = triton_compile.build("adam fp32", 90).ptx
    assert "div.rn.f32" in ptx and "sqrt.rn.f32" in ptx
    assert not re.search(r"\.ftz|\.approx|div\.full", ptx)


def test_only_dtypes_and_the_kind_of_norm_make_variants(tmp_path):
    # Not sizes, strides, the alignment of small tables, p, limits: each would compile for seconds.
    script = Path(__file__).with_name("triton_variants.py")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    once = dict.fromkeys(("gather_kernel", "scale_kernel", "adam_kernel", "sgd_kernel", "finish_kernel"), 1)
    assert json.loads(result.stdout) == {**once, "norm_kernel": 2}  # p = 2 and other p
