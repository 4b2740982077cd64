"""The same bits at every instruction level, for any number of threads, in every run."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from fastaccum import dispatch  # noqa: E402
from tests.bits import assert_same, clone  # noqa: E402
from tests.cases import CASES  # noqa: E402
from tests.conftest import levels  # noqa: E402

pytestmark = pytest.mark.native
VARIANTS = [pytest.param(c, v, id=f"{c.name}-{v.desc}") for c in CASES for v in c.variants]
# Several batches of chunks (a batch is 131 072 elements), and remainders of every kind.
SIZES = [0, 7, 140_001, 511, 0, 513, 150_002, 33, 8192, 1, 0]
SMALL = [0, 7, 2049, 511, 0, 513, 31, 8193, 0]


def results(case, variant, sizes, dtype):
    """The arguments after a run, for each number of threads, twice for the last."""
    args, kwargs = case.make("cpu", dtype, sizes, 0, shift=1, **variant.options)
    for threads in (1, 2, 3, 3):
        torch.set_num_threads(threads)
        mine = clone((args, kwargs))
        case.raw(*mine[0], **mine[1])
        yield f"{threads} threads", case.named(*mine)


@pytest.mark.parametrize(("case", "variant"), [pytest.param(c, c.variants[-2], id=c.name) for c in CASES])
def test_threads_do_not_change_a_bit(case, variant, level):
    first = None
    for note, named in results(case, variant, SIZES, case.dtypes[0]):
        first = first or named
        assert_same(named, first, f"{level}, {note}")


@pytest.mark.quick
@pytest.mark.parametrize("level", ["avx2", "avx512"], indirect=True)
@pytest.mark.parametrize(("case", "variant"), VARIANTS)
def test_b05_levels_agree_with_the_baseline(case, variant, level):
    module, _ = dispatch.native_module()
    for dtype in case.dtypes:
        args, kwargs = case.make("cpu", dtype, SMALL, 0, shift=1, **variant.options)
        theirs = clone((args, kwargs))
        case.raw(*args, **kwargs)
        module.set_isa("baseline")
        case.raw(*theirs[0], **theirs[1])
        module.set_isa(level)
        assert_same(case.named(args, kwargs), case.named(*theirs), f"{level}, {dtype}")


@pytest.mark.quick
def test_the_best_level_is_taken_and_can_be_changed(level):
    module, _ = dispatch.native_module()
    assert module.isa() == level and level in levels()
    assert levels()[-1] == "baseline"
    assert not module.set_isa("avx9")
    assert module.isa() == level


@pytest.mark.quick
def test_b05_a_level_that_is_not_there_is_refused_with_reasons(monkeypatch):
    if not levels():
        pytest.skip("no native code")
    monkeypatch.setenv("FASTACCUM_ISA", "avx9")
    reasons = dispatch.reasons_against("native", torch.device("cpu"))
    assert len(reasons) == 1 and reasons[0].startswith("FASTACCUM_ISA=avx9: this CPU")
    monkeypatch.setenv("FASTACCUM_ISA", levels()[-1])
    assert dispatch.reasons_against("native", torch.device("cpu")) == []
