"""Which implementation runs on which device, and why the others do not.

A backend is a set of functions named like the ops (:data:`fastaccum.ops.NAMES`), called without the
public functions' checks: the accumulator builds its arguments itself. ``fastaccum.backends()`` and
``python -m fastaccum doctor`` show the choice.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from fastaccum import ops, reference

NAMES = ("native", "triton", "reference")
CPU = torch.device("cpu")


@functools.cache
def native_module() -> tuple[Any, str | None]:
    """The compiled module, or None and the reason.

    One that is there but cannot be loaded is also warned of: it was built to be used.
    """
    try:
        return importlib.import_module("fastaccum._C"), None
    except ImportError as error:
        note = _build_note()
        if importlib.util.find_spec("fastaccum._C") is None:
            return None, note or str(error)
        reason = (
            f"it is there ({note or 'built elsewhere'}) but this torch {torch.__version__} cannot load it "
            f"({error}): build it again, pip install --no-build-isolation --force-reinstall fastaccum"
        )
        warnings.warn(f"fastaccum runs without its native library: {reason}", RuntimeWarning, stacklevel=2)
        return None, reason


def _build_note() -> str | None:
    """What setup.py wrote down: what native code was built with, or why there is none."""
    from importlib import resources

    note = resources.files("fastaccum") / "_build_note.txt"
    return note.read_text().strip() if note.is_file() else None


OLDEST_CAPABILITY = (8, 0)  # of a GPU: what the kernels are compiled for
TRITON_VERSIONS = ((3, 6), (3, 9))  # the oldest and the newest that have been tried


def reasons_against(backend: str, device: torch.device) -> list[str]:
    """Why a backend cannot serve a device; empty if it can."""
    if backend == "reference":
        return []
    if backend == "triton":
        return _reasons_against_triton(device)
    module, reason = native_module()
    if module is None:
        return [f"the native library is not there: {reason}"]
    if device.type == "cuda":
        return _reasons_against_cuda(module.build_info(), device)
    if device.type != "cpu":
        return [f"there are no native kernels for {device.type}"]
    wanted = os.environ.get("FASTACCUM_ISA")
    if wanted and wanted not in module.isa_available().split():
        return [f"FASTACCUM_ISA={wanted}: this CPU (and build) has {module.isa_available()}"]
    return []


def _reasons_against_cuda(info: dict[str, str], device: torch.device) -> list[str]:
    toolkit = info.get("cuda", "")
    if not toolkit:
        return [f"the native library was built without CUDA: {info.get('cuda_note', 'unknown reason')}"]
    reasons = []
    if torch.version.cuda is None:
        return ["this torch is not a CUDA build"]
    module, _ = native_module()
    if not module.knows_stream():
        reasons.append("torch's current CUDA stream cannot be asked for (libtorch_cuda.so is not loaded)")
    if toolkit.split(".")[0] != torch.version.cuda.split(".")[0]:
        reasons.append(
            f"the kernels were built with CUDA {toolkit}, torch with {torch.version.cuda}: rebuild fastaccum "
            "with a toolkit of the same major version"
        )
    reasons += _reasons_against_gpu(device)
    if not reasons and not _serves(info["cuda_archs"], torch.cuda.get_device_capability(device)):
        major, minor = torch.cuda.get_device_capability(device)
        reasons.append(
            f"the kernels were built for {info['cuda_archs']}, the GPU is {major}.{minor}: rebuild fastaccum "
            f"with FASTACCUM_CUDA_ARCHS={major}.{minor}"
        )
    return reasons


def _serves(archs: str, capability: tuple[int, int]) -> bool:
    """Whether code built for ``8.0;10.0+PTX`` runs on a GPU: the same major version, or made from PTX."""
    for arch in archs.split(";"):
        number = arch.removesuffix("+PTX")
        if number[-1] in "af":  # features of one chip, or of one family: nothing else
            if f"{capability[0]}.{capability[1]}" == number[:-1]:
                return True
            continue
        major, minor = map(int, number.split("."))
        if (major == capability[0] and minor <= capability[1]) or (
            arch.endswith("+PTX") and (major, minor) <= capability
        ):
            return True
    return False


def _reasons_against_gpu(device: torch.device) -> list[str]:
    if not torch.cuda.is_available():
        return ["torch sees no GPU"]
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CAPABILITY:
        return [f"the GPU's compute capability is {capability[0]}.{capability[1]}, 8.0 is needed"]
    return []


def _reasons_against_triton(device: torch.device) -> list[str]:
    try:
        triton = importlib.import_module("triton")
    except ImportError as error:
        return [f"Triton cannot be imported: {error}"]
    oldest, newest = TRITON_VERSIONS
    version = tuple(int(n) for n in triton.__version__.split(".")[:2])
    reasons = []
    if not oldest <= version <= newest:
        reasons.append(f"Triton {triton.__version__} has not been tried; 3.6 to 3.9 have")
    if os.environ.get("TRITON_INTERPRET") == "1":
        return reasons
    if device.type != "cuda":
        return [*reasons, f"Triton kernels run on a GPU, not on {device.type} (but for TRITON_INTERPRET=1)"]
    return reasons + _reasons_against_gpu(device)


def choose(backend: str, device: torch.device) -> str:
    """The backend's name for a device.

    Args:
        backend: ``auto`` takes the first that can serve the device, in the order native, triton,
            reference, or what ``FASTACCUM_BACKEND`` says.
        device: where the gradients are.

    Raises:
        ValueError: an unknown name.
        RuntimeError: a backend was asked for that cannot run; every reason is given.
    """
    asked = backend
    if backend == "auto":
        backend = os.environ.get("FASTACCUM_BACKEND", "auto")
        asked = f"FASTACCUM_BACKEND={backend}"
    if backend not in ("auto", *NAMES):
        raise ValueError(f"backend must be one of auto, {', '.join(NAMES)}, got {asked!r}")
    if backend == "auto":
        return next(name for name in NAMES if not reasons_against(name, device))
    reasons = reasons_against(backend, device)
    if reasons:
        raise RuntimeError(
            f"backend {asked!r} cannot run on {device}: " + "; ".join(reasons)
            + ". Use backend='auto' to take one that can."
        )  # fmt: skip
    return backend


@functools.cache
def load(name: str, device: torch.device = CPU) -> Any:
    """The functions of a backend that :func:`choose` has named, for one device.

    Returns:
        an object with a function for each of :data:`fastaccum.ops.NAMES`, its ``name``, and whether it is
        ``synchronous``: its results may be read by the host without waiting for anything.
    """
    if name == "triton" or (name == "native" and device.type != "cpu"):
        from fastaccum import gpu, launchers

        make = launchers.CudaLauncher if name == "native" else launchers.TritonLauncher
        return gpu.Backend(make(device), device)
    functions: dict[str, Callable[..., None]] = {}
    for op in ops.NAMES:
        if name == "reference":
            functions[op] = getattr(reference, op)
        else:
            functions[op] = getattr(torch.ops.fastaccum, op).default
    return SimpleNamespace(name=name, synchronous=True, **functions)


def backends(device: torch.device | str | None = None) -> dict[str, dict[str, list[str]]]:
    """For each device: each backend and the reasons why it cannot run (none: it can).

    Args:
        device: one device, or None for the CPU and every GPU that torch sees.

    Raises:
        RuntimeError: torch knows no such kind of device.
    """
    if device is not None:
        devices = [torch.device(device)]
    else:
        devices = [torch.device("cpu")]
        devices += [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return {str(d): {name: reasons_against(name, d) for name in NAMES} for d in devices}


def _register() -> None:
    """Gives torch.ops.fastaccum its kernels: CPU native ones, or the reference; on a GPU the best there."""
    module, _ = native_module()
    for op in ops.NAMES:
        if module is None:
            ops.LIBRARY.impl(op, getattr(reference, op), "CompositeExplicitAutograd")
        ops.LIBRARY.impl(op, functools.partial(_on_gpu, op), "CUDA")


def _on_gpu(op: str, *args: Any) -> None:
    """An op that was called directly with tensors on a GPU; the accumulator knows its backend."""
    device = next(
        tensor.device
        for arg in args
        for tensor in (arg if isinstance(arg, (list, tuple)) else (arg,))
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda
    )
    args = _all_arguments(op, args)
    ops.CHECKS[op](*args)
    getattr(load(choose("auto", device), device), op)(*args)


def _all_arguments(op: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with the schema's defaults."""
    schema = getattr(torch.ops.fastaccum, op).default._schema
    return (*args, *(argument.default_value for argument in schema.arguments[len(args) :]))


_register()
