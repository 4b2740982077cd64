"""Sizes at which the code changes its ways: streamed stores above the caches, many chunks per thread."""

import pytest
import torch

from fastaccum import dispatch
from fastaccum.layout import CHUNK, Layout

pytestmark = pytest.mark.native

STREAM_BYTES = 32 << 20  # csrc/cpu/core.cpp


@pytest.mark.parametrize("bytes_off", [-4 * CHUNK, 0, 4 * CHUNK])
def test_streamed_gather_equals_eager_and_its_norm_matches(bytes_off):
    if dispatch.native_module()[0] is None:
        pytest.skip("no native library")
    native = dispatch.load("native")
    numels = [3, (STREAM_BYTES + bytes_off) // 4 - 3 * 512 - 700, 0, 700, 513]
    layout = Layout.of(numels)
    segments = torch.tensor(list(zip(layout.offsets, layout.numels, strict=True)))
    index = torch.arange(len(numels))
    generator = torch.Generator().manual_seed(0)
    kept, fresh, late = ([torch.randn(n, generator=generator) for n in numels] for _ in range(3))
    buffer = torch.full((layout.numel,), float("nan"))
    present = torch.zeros(len(numels), dtype=torch.uint8)
    partials = torch.empty(2, layout.n_chunks, dtype=torch.float64)
    third = torch.tensor(1 / 3, dtype=torch.float64)
    none = index[:0]
    native.gather_(buffer, present, partials, segments, fresh, index, kept, index, third, None, 2.0)
    expected = [k + g * torch.tensor(1 / 3) for k, g in zip(kept, fresh, strict=True)]
    views = [buffer[o : o + n] for o, n in zip(layout.offsets, numels, strict=True)]
    for view, value in zip(views, expected, strict=True):
        assert torch.equal(view, value)
    exact = torch.cat(expected).double().square().sum()
    assert abs(partials[0].sum() / exact - 1) < 1e-12
    native.gather_(buffer, present, None, segments, late, index, [], none, None, None, 2.0)
    for view, value, g in zip(views, expected, late, strict=True):
        assert torch.equal(view, value + g)


def test_streamed_gather_is_the_same_at_every_level_and_thread_count():
    module, reason = dispatch.native_module()
    if module is None:
        pytest.skip(f"no native library: {reason}")
    native = dispatch.load("native")
    n = STREAM_BYTES // 4 + 5 * CHUNK + 77
    layout = Layout.of([n])
    segments, index = torch.tensor([[0, n]]), torch.arange(1)
    kept, fresh = torch.randn(n), torch.randn(n)
    results = []
    level, threads = module.isa(), torch.get_num_threads()
    try:
        for isa in module.isa_available().split():
            for count in (1, 3):
                module.set_isa(isa)
                torch.set_num_threads(count)
                buffer = torch.empty(layout.numel)
                present = torch.zeros(1, dtype=torch.uint8)
                partials = torch.empty(2, layout.n_chunks, dtype=torch.float64)
                native.gather_(
                    buffer, present, partials, segments, [fresh], index, [kept], index, None, None, 2.0
                )
                results.append((buffer[:n].clone(), partials))
    finally:
        module.set_isa(level)
        torch.set_num_threads(threads)
    for buffer, partials in results[1:]:
        assert torch.equal(buffer, results[0][0])
        assert torch.equal(partials, results[0][1])
