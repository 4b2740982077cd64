"""What every test starts from: a seed, threads, the instruction level, the backends' names."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from fastaccum import dispatch  # noqa: E402

# Held to the reference. Triton joins when its kernels are there.
BACKENDS = ("native",)


# They take a minute or so, the others seconds: begun first, or one process ends them alone.
LONG = (
    "lifecycle cuda_kernels distributed fuzz benchmarks compiled gpu_check demo optim_db build_cuda counters"
).split()


def pytest_collection_modifyitems(items) -> None:
    """Puts the long files first."""
    order = {f"test_{name}.py": place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


def levels() -> tuple[str, ...]:
    """The instruction levels of the native code, best first; empty without it."""
    module, _ = dispatch.native_module()
    return tuple(module.isa_available().split()) if module is not None else ()


def pytest_addoption(parser) -> None:
    parser.addoption(
        "--emulated",
        action="store_true",
        help="let the emulated CUDA kernels stand in for the native CPU ones, and forbid host reads",
    )


@pytest.fixture(autouse=True)
def _emulated(request, monkeypatch):
    """With --emulated: the accumulator's native backend is the CUDA kernels, run on the CPU."""
    if not request.config.getoption("--emulated"):
        return
    if request.node.get_closest_marker("frames"):
        pytest.skip("counts the frames of the call stack, to which --emulated adds")
    from tests import emulated, no_sync

    original = dispatch.load
    made = emulated.backend()

    def load(name: str, device: torch.device = dispatch.CPU):
        return made if name == "native" and device.type == "cpu" else original(name, device)

    monkeypatch.setattr(dispatch, "load", load)
    no_sync.watch(monkeypatch)


@pytest.fixture(autouse=True)
def _same_start():
    """Seeds torch; puts back the threads and the instruction level that a test changed."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed looks for GPUs: 4 ms a test
    threads = torch.get_num_threads()
    module, _ = dispatch.native_module()
    level = module.isa() if module is not None else None
    yield
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    if module is not None:
        module.set_isa(level)


@pytest.fixture(params=BACKENDS)
def backend(request) -> str:
    """A backend that can run here."""
    reasons = dispatch.reasons_against(request.param, torch.device("cpu"))
    if reasons:
        pytest.skip("; ".join(reasons))
    return request.param


@pytest.fixture(params=("baseline", "avx2", "avx512"))
def level(request) -> str:
    """An instruction level, switched on."""
    module, reason = dispatch.native_module()
    if module is None:
        pytest.skip(f"no native code: {reason}")
    if not module.set_isa(request.param):
        pytest.skip(f"no {request.param} here: this CPU (and build) has {module.isa_available()}")
    return request.param
