"""What every test starts from: a seed, threads, the instruction level, the backends' names."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from fastaccum import backends  # noqa: E402

# Held to the reference. Triton joins when its kernels are there.
BACKENDS = ("native",)


def levels() -> tuple[str, ...]:
    """The instruction levels of the native code, best first; empty without it."""
    module, _ = backends.native_module()
    return tuple(module.isa_available().split()) if module is not None else ()


@pytest.fixture(autouse=True)
def _same_start():
    """Seeds torch; puts back the threads and the instruction level that a test changed."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed looks for GPUs: 4 ms a test
    threads = torch.get_num_threads()
    module, _ = backends.native_module()
    level = module.isa() if module is not None else None
    yield
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    if module is not None:
        module.set_isa(level)


@pytest.fixture(params=BACKENDS)
def backend(request) -> str:
    """A backend that can run here."""
    reasons = backends.reasons_against(request.param, torch.device("cpu"))
    if reasons:
        pytest.skip("; ".join(reasons))
    return request.param


@pytest.fixture(params=("baseline", "avx2", "avx512"))
def level(request) -> str:
    """An instruction level, switched on."""
    module, reason = backends.native_module()
    if module is None:
        pytest.skip(f"no native code: {reason}")
    if not module.set_isa(request.param):
        pytest.skip(f"no {request.param} here: this CPU (and build) has {module.isa_available()}")
    return request.param
