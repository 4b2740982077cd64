"""Conversions between the dtypes are torch's, for every code, at every instruction level.

Everything goes through ``scale_into_`` with a factor of 1, in one long tensor (vector code) and in
tensors of 7 (its remainder).
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from fastaccum import ops  # noqa: E402
from tests.bits import different  # noqa: E402

pytestmark = pytest.mark.native
ONE = torch.ones(1, dtype=torch.float64)


def convert(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(x.numel(), dtype=dtype)
    ops.scale_into_([out], [x], ONE)
    return out


def convert_in_sevens(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(x.numel(), dtype=dtype)
    ops.scale_into_(list(out.split(7)), list(x.split(7)), ONE)
    return out


def assert_converts(x: torch.Tensor, dtype: torch.dtype, how=convert) -> None:
    bad = different(how(x, dtype), x.to(dtype)).nonzero().flatten()
    assert not len(bad), f"{len(bad)} values, first {x[bad[0]].item()!r} ({x[bad[0]].item().hex()})"


def codes(dtype: torch.dtype) -> torch.Tensor:
    """Every value that a 16-bit type has."""
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)


def from_bits(bits: torch.Tensor) -> torch.Tensor:
    """float32 of unsigned 32-bit codes in int64."""
    return (bits - (bits >> 31 << 32)).to(torch.int32).view(torch.float32)


def bfloat16_boundaries() -> torch.Tensor:
    """Each upper half, just below, at and just above the tie."""
    upper = torch.arange(2**16) << 16
    return from_bits(torch.cat([upper + low for low in (0x7FFF, 0x8000, 0x8001)]))


def float16_boundaries() -> torch.Tensor:
    """Likewise for the 13 bits that a half lacks, and around every denormal half's tie."""
    upper = torch.arange(2**19) << 13
    normal = from_bits(torch.cat([upper + low for low in (0x0FFF, 0x1000, 0x1001)]))
    ties = (torch.arange(1100).float() + 0.5) * 2.0**-24
    away = [torch.nextafter(ties, torch.tensor(to)) for to in (0.0, 1.0)]
    return torch.cat([normal, ties, -ties, *away])


@pytest.mark.parametrize("how", [convert, convert_in_sevens])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_code_widens(level, dtype, how):
    assert_converts(codes(dtype), torch.float32, how)
    assert_converts(codes(dtype), torch.float64, how)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_code_survives_a_round_trip(level, dtype):
    assert not different(convert(convert(codes(dtype), torch.float32), dtype), codes(dtype)).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_boundaries_round_as_torch_does(level, dtype):
    special = [float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 65504.0, 65519.99, 65520.0]
    special = torch.tensor([*special, 1e-45, -1e-45, 3.3895314e38, 3.4e38, 2.0**-25, 2.0**-24])
    random = from_bits(torch.randint(2**32, (200_000,)))
    for x in (bfloat16_boundaries(), float16_boundaries(), special, random):
        assert_converts(x, dtype)
    for x in (bfloat16_boundaries()[::11], float16_boundaries()[::61], special, random[::11]):
        assert_converts(x.contiguous(), dtype, convert_in_sevens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_float64_rounds_as_torch_does(level, dtype):
    x = torch.randn(50_000, dtype=torch.float64) * torch.exp2(torch.randint(-160, 140, (50_000,)))
    near_ties = torch.nextafter(float16_boundaries()[::7].double(), torch.tensor(1.0).double())
    special = torch.tensor([1e300, -1e300, 1e-300, float("inf"), float("nan"), 0.0, -0.0]).double()
    for values in (x, near_ties, special):
        assert_converts(values, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_between_the_narrow_types(level, dtype):
    for source in (torch.bfloat16, torch.float16):
        assert_converts(codes(source), dtype)
