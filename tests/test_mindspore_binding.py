"""The operators that MindSpore loads, called as it calls them, through their C functions: no MindSpore here.

Runs under sanitizers too. The oracle is the plain-PyTorch reference, which other tests hold to float64.
"""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fastaccum import reference  # noqa: E402
from tests.mindspore_calls import LIBRARY, SIZES, Window, call, done, gradients, hyper_rows, refusal  # noqa: E402

pytestmark = [
    pytest.mark.quick,
    pytest.mark.native,
    pytest.mark.skipif(not LIBRARY.is_file(), reason="built without native code"),
]


@pytest.mark.parametrize("weights", [None, (3.0, 5.0, 0.5)])
def test_accumulate_adds_bit_for_bit_and_sums_the_norm(weights):
    window, wanted = Window(), None
    for i in range(3):
        grads = gradients(i)
        w = np.float32(1.0 if weights is None else weights[i])
        assert window.accumulate(grads, (w, w, float(weights is not None))) == 0
        wanted = (
            [g * w for g in grads]
            if wanted is None
            else [a + g * w for a, g in zip(wanted, grads, strict=True)]
        )
    for got, want in zip(window.sums(), wanted, strict=True):
        assert np.array_equal(got, want)
    assert window.window.tolist() == [3.0, 3.0 if weights is None else 8.5, float(weights is not None)]
    assert window.present.tolist() == [1] * window.n
    exact = math.fsum(float(x) ** 2 for a in wanted for x in a)
    assert math.isclose(window.partials[0].sum(), exact, rel_tol=1e-14)
    assert not window.partials[1].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_gradients_are_summed_in_float32(dtype):
    window, wanted = Window(), None
    for i in range(4):
        tensors = [torch.from_numpy(g).to(dtype) for g in gradients(i)]
        arrays = [t.view(torch.int16).numpy() if t.element_size() == 2 else t.numpy() for t in tensors]
        assert window.accumulate(arrays, dtypes=[str(dtype).removeprefix("torch.")] * window.n) == 0
        wide = [t.float().numpy() for t in tensors]
        wanted = wide if wanted is None else [a + b for a, b in zip(wanted, wide, strict=True)]
    for got, want in zip(window.sums(), wanted, strict=True):
        assert np.array_equal(got, want)


def test_clear_touches_no_gradient_and_the_next_window_overwrites():
    window = Window()
    window.accumulate(gradients(0))
    before = window.buffer.copy()
    assert call("clear", window.window, window.present, done()) == 0
    assert window.window.tolist() == [0.0, 0.0, 0.0] and not window.present.any()
    assert np.array_equal(window.buffer, before, equal_nan=True)
    grads = gradients(1)
    window.accumulate(grads)
    for got, want in zip(window.sums(), grads, strict=True):
        assert np.array_equal(got, want)


def test_finish_averages_clips_and_counts():
    window = Window()
    window.accumulate(gradients(0), (2.0, 2.0, 1.0))
    window.accumulate(gradients(1), (3.0, 3.0, 1.0))
    hyper = hyper_rows(window.n, LR=1e-3, BETA1=0.9, BETA2=0.999)
    window.step[0] = 6
    assert window.finish(hyper, max_norm=0.5, loss_scale=4.0) == 0
    total = math.sqrt(math.fsum(float(x) ** 2 for a in window.sums() for x in a))
    norm = total / 5.0 / 4.0
    assert abs(window.outcome[0] - norm) <= 2 * np.spacing(np.float32(norm))
    assert math.isclose(window.outcome[1], 0.5 / (norm + 1e-6) / 20.0, rel_tol=1e-12)
    assert window.outcome[2:].tolist() == [0.0, 0.0] and window.step[0] == 7
    step_size, root, first, lr = window.scalars[3]
    assert math.isclose(step_size, 1e-3 / (1 - 0.9**7), rel_tol=1e-12)
    assert math.isclose(root, 1 / math.sqrt(1 - 0.999**7), rel_tol=1e-9)
    assert (first, lr) == (0.0, 1e-3)


@pytest.mark.parametrize("form,flags", [("epsilon hat", 16), ("uncorrected", 32)])
def test_finish_knows_mindspores_forms_of_adam(form, flags):
    window = Window()
    window.accumulate(gradients(0))
    window.step[0] = 2
    window.finish(hyper_rows(window.n, LR=0.1, BETA1=0.9, BETA2=0.999, FLAGS=flags))
    step_size, root = window.scalars[0][:2]
    wanted = 0.1 * math.sqrt(1 - 0.999**3) / (1 - 0.9**3) if form == "epsilon hat" else 0.1
    assert math.isclose(step_size, wanted, rel_tol=1e-12) and root == 1.0


@pytest.mark.parametrize("finite", [True, False])
def test_finish_keeps_the_powers_of_the_betas(finite):
    window, grads = Window(), gradients(0)
    grads[0][0] = 1.0 if finite else math.nan
    window.accumulate(grads)
    window.step[0] = 4
    powers = [np.full(1, 0.5, np.float32), np.full(1, 0.25, np.float32)]
    tables = (np.array([math.inf, 1.0, 1.0, 1.0]), hyper_rows(window.n, BETA1=0.9, BETA2=0.999))
    tables += (window.window, window.partials, window.outcome, window.scalars, window.step)
    assert call("finish", *tables, *powers, done()) == 0
    wanted = [0.9**5, 0.999**5] if finite else [0.5, 0.25]
    assert [float(p[0]) for p in powers] == [float(np.float32(w)) for w in wanted]
    assert call("finish", *tables, powers[0], done()) == 1 and "too many" in refusal()


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_window_that_is_not_finite_is_skipped(bad):
    window = Window()
    grads = gradients(0)
    grads[5][17_000] = bad
    window.accumulate(grads)
    hyper = hyper_rows(window.n, LR=1.0, BETA1=0.9, BETA2=0.99, EPS=1e-8, MOMENTUM=0.9)
    window.finish(hyper)
    assert window.outcome[2:].tolist() == [1.0, 1.0] and window.step[0] == 0
    for name, lists in (("adam", 3), ("sgd", 2), ("sgd", 3)):
        arrays = [gradients(9 + i) for i in range(lists)]
        before = [[a.copy() for a in each] for each in arrays]
        assert window.update(name, hyper, *arrays) == 0
        for each, old in zip(arrays, before, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(each, old, strict=True)), name


def reference_update(window, name, hyper, lists):
    """The same by fastaccum.reference, on copies."""
    tensors = [[torch.from_numpy(a.copy()) for a in each] for each in lists]
    index = torch.arange(window.n)
    grads = [torch.from_numpy(g.copy()) for g in window.sums()]
    tables = (torch.from_numpy(window.segments), index, index, index, torch.from_numpy(hyper))
    rest = (torch.from_numpy(window.scalars), torch.tensor([window.outcome[1]]), torch.tensor(0))
    if name == "adam":
        extra = tensors[3] if len(tensors) > 3 else []
        reference.adam_(*tensors[:3], extra, [], grads, *tables, *rest)
    else:
        reference.sgd_(*tensors, [], grads, *tables, *rest)
    return [[t.numpy() for t in each] for each in tensors]


@pytest.mark.parametrize("flags,lists", [(0, 3), (1, 3), (2, 4), (1 + 4, 3), (16, 3), (32 + 1, 3)])
def test_adam_is_the_reference_bit_for_bit(flags, lists):
    window = Window()
    window.accumulate(gradients(0))
    window.accumulate(gradients(1))
    hyper = hyper_rows(window.n, LR=1e-2, BETA1=0.9, BETA2=0.999, EPS=1e-6, DECAY=0.05, FLAGS=flags)
    window.step[0] = 3
    window.finish(hyper, max_norm=1.0)
    arrays = [gradients(10 + i) for i in range(lists)]
    arrays[2:] = [[np.abs(a) for a in each] for each in arrays[2:]]
    wanted = reference_update(window, "adam", hyper, arrays)
    assert window.update("adam", hyper, *arrays) == 0
    for each, want in zip(arrays, wanted, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(each, want, strict=True))


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("momentum,flags", [(0.0, 0), (0.9, 0), (0.9, 8), (0.9, 4)])
def test_sgd_is_the_reference_bit_for_bit_and_marks_its_first_step(momentum, flags, first):
    window = Window()
    window.accumulate(gradients(0))
    hyper = hyper_rows(
        window.n, LR=1e-2, DECAY=0.05, MOMENTUM=momentum, DAMPENING=0.0 if flags == 8 else 0.3, FLAGS=flags
    )
    window.step[0] = 0 if first else 4
    window.finish(hyper)
    arrays = [gradients(10), gradients(11)]
    marks = [np.full(n, float(first), np.float32) for n in SIZES]
    wanted = reference_update(window, "sgd", hyper, arrays)
    assert window.update("sgd", hyper, *arrays, marks) == 0
    for each, want in zip(arrays, wanted, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(each, want, strict=True))
    assert all(np.all(m == (1.0 if first and momentum == 0.0 else 0.0)) for m in marks)


def test_finished_gradients_are_averaged_and_clipped():
    window = Window()
    window.accumulate(gradients(0))
    window.accumulate(gradients(1))
    window.scalars = np.zeros((1, 4))
    assert window.finish(hyper_rows(1), max_norm=2.0) == 0
    out = [np.full(n, np.nan, np.float32) for n in SIZES]
    assert call("finished", window.segments, window.outcome, window.buffer, *out) == 0
    factor = np.float32(window.outcome[1])
    for got, total in zip(out, window.sums(), strict=True):
        assert np.array_equal(got, total * factor)
    norm = math.sqrt(math.fsum(float(x) ** 2 for a in out for x in a))
    assert math.isclose(norm, 2.0, rel_tol=1e-5)


@pytest.mark.parametrize(
    "change,words",
    [
        (lambda w, g: g.pop(), r"done .* is missing|float32"),
        (lambda w, g: g.append(np.zeros(3, np.float32)), "too many|done"),
        (lambda w, g: g.__setitem__(2, g[2][:-1]), "gradients .* 512 elements, got float32 with 511"),
        (lambda w, g: g.__setitem__(2, g[2].astype(np.int32)), "gradients .* got int32"),
        (lambda w, g: setattr(w, "window", np.zeros(2)), "window .* 3 elements, got float64 with 2"),
        (lambda w, g: setattr(w, "present", np.zeros(w.n, np.int8)), "present .* uint8"),
        (lambda w, g: setattr(w, "partials", w.partials[:, :-1].copy()), "partials"),
        (lambda w, g: setattr(w, "buffer", w.buffer[:-600]), "buffer .* at least"),
        (lambda w, g: w.segments.__setitem__((1, 0), 1), "multiples of 512"),
        (lambda w, g: w.segments.__setitem__((2, 0), 0), "ascend"),
    ],
)
def test_a_wrong_call_is_refused_and_changes_nothing(change, words, capfd):
    window, grads = Window(), gradients(0)
    window.accumulate(grads)
    change(window, grads)
    names = ("segments", "window", "present", "partials", "buffer")
    before = {name: getattr(window, name).copy() for name in names}
    assert window.accumulate(grads) == 1
    assert re.search(words, refusal()), refusal()
    assert refusal().startswith("fastaccum: accumulate: ") and refusal() in capfd.readouterr().err
    for name, old in before.items():
        assert np.array_equal(getattr(window, name), old, equal_nan=True), name


def test_updates_refuse_a_wrong_number_of_lists():
    window = Window()
    window.accumulate(gradients(0))
    window.finish(hyper_rows(window.n))
    assert window.update("adam", hyper_rows(window.n), gradients(1), gradients(2)) == 1
    assert "three lists" in refusal()
    assert window.update("sgd", hyper_rows(window.n), gradients(1)) == 1
    assert "two lists" in refusal()
    amsgrad = hyper_rows(window.n, FLAGS=2)
    assert window.update("adam", amsgrad, gradients(1), gradients(2), gradients(3)) == 1
    assert "fourth list" in refusal()


THREADS = """
import ctypes, hashlib, os, sys
sys.path[:0] = [{root!r}]
from tests.mindspore_calls import LIBRARY, Window, gradients

def digest():
    window = Window((1_000_000, 513, 300_000))
    for i in range(3):
        assert window.accumulate(gradients(i, (1_000_000, 513, 300_000))) == 0
    return hashlib.sha256(window.buffer.tobytes() + window.partials.tobytes()).hexdigest()

print(ctypes.CDLL(str(LIBRARY)).fastaccum_threads(), digest())
if os.environ.get("FORK"):
    child = os.fork()
    if child == 0:
        print("child", digest(), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def run(**environment):
    code = THREADS.format(root=str(Path(__file__).resolve().parent.parent))
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split("\n")


def test_any_number_of_threads_gives_the_same_bits():
    lines = [run(FASTACCUM_THREADS=str(n))[0].split() for n in (1, 2, 7)]
    assert [int(threads) for threads, _ in lines] == [1, 2, 7]
    assert len({digest for _, digest in lines}) == 1


@pytest.mark.parametrize("text", ["0", "-3", "many", "5000", ""])
def test_a_number_of_threads_that_is_none_means_all_cores(text):
    assert int(run(FASTACCUM_THREADS=text)[0].split()[0]) == len(os.sched_getaffinity(0))


def test_a_forked_child_computes_with_threads_of_its_own():
    first, second = run(FASTACCUM_THREADS="4", FORK="1")[:2]
    assert second.split() == ["child", first.split()[1]]
