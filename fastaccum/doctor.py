"""``python -m fastaccum doctor``: what is here, what runs and why, and whether it computes rightly."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
from collections.abc import Iterator
from typing import Any

from fastaccum._version import __version__

SWITCHES = {
    "FASTACCUM_BACKEND": "what backend='auto' means",
    "FASTACCUM_ISA": "forces an instruction level of the native CPU code",
    "TRITON_INTERPRET": "1 runs the Triton kernels in their interpreter, on the CPU too",
}


def _version_of(module: str) -> str:
    try:
        return str(getattr(importlib.import_module(module), "__version__", "unknown version"))
    except Exception as error:  # a broken library raises what it likes, OSError for one
        return f"not importable ({error})"


def _self_test(backend: str, device: str) -> str:
    """One small clipped window against float64 stock on the CPU; the verdict."""
    import torch

    from fastaccum import FusedAccumulator

    def train(dtype: torch.dtype, wrap: bool) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        on = device if wrap else "cpu"
        param = torch.nn.Parameter(torch.randn(10_007, generator=generator).to(on, dtype))
        optimizer = torch.optim.AdamW([param], lr=0.01)
        wrapper = FusedAccumulator(optimizer, 3, max_norm=1.0, backend=backend) if wrap else None
        grads = [torch.randn(10_007, generator=generator).to(on, dtype) for _ in range(3)]
        for grad in grads:
            if wrapper:
                param.grad = grad
                wrapper.step()
        if not wrapper:
            param.grad = torch.stack(grads).sum(0) / 3
            torch.nn.utils.clip_grad_norm_([param], 1.0, foreach=False)
            optimizer.step()
        return param.detach().double().cpu()

    exact, stock = train(torch.float64, False), train(torch.float32, False)
    try:
        error = (train(torch.float32, True) - exact).abs().max().item()
    except Exception as failure:  # the other backends are to be told of, too
        return f"FAILED ({type(failure).__name__}: {failure})"
    allowed = 2 * (stock - exact).abs().max().item() + 1e-9
    verdict = "passed" if error <= allowed else "FAILED"
    return f"{verdict} (error {error:.2e}, allowed {allowed:.2e})"


def _lines(wrong: list[str], tested: bool) -> Iterator[str]:
    """The report, line by line: what comes late or fails takes nothing away of what came before.

    Args:
        wrong: the lines that tell of something wrong are added to it.
        tested: with a self-test of each backend that can run.
    """
    yield f"fastaccum {__version__}   Python {platform.python_version()}   {platform.platform()}"
    for module in ("torch", "triton", "numpy"):
        yield f"{module:<10} {_version_of(module)}"
    for name, effect in SWITCHES.items():
        yield f"{name:<18} {os.environ.get(name, 'not set'):<10} {effect}"
    if "torch" not in sys.modules:
        wrong.append("torch is missing: pip install torch, then reinstall fastaccum to build its native code")
        yield wrong[-1]
        return
    import torch

    from fastaccum import dispatch, ops

    yield ""
    yield from _native_lines(*dispatch.native_module())
    for device, reasons in dispatch.backends().items():
        yield ""
        try:
            chosen = dispatch.choose("auto", torch.device(device))
        except (RuntimeError, ValueError) as error:  # the switch asks for what cannot run
            wrong.append(f"{device}: backend 'auto' is none: {error}")
            yield wrong[-1]
        else:
            yield f"{device}: backend 'auto' is {chosen}"
            # A backend has all ops or does not serve the device.
            yield from (f"  {op:<12} {chosen}" for op in ops.NAMES)
        for name, against in reasons.items():
            line = f"  {name:<10} no: {'; '.join(against)}" if against else f"  {name:<10} yes"
            if tested and not against:
                verdict = _self_test(name, device)
                line += f"; self-test {verdict}"
                if not verdict.startswith("passed"):
                    wrong.append(line)
            yield line


def _native_lines(module: Any, reason: str | None) -> Iterator[str]:
    """What the native library was built with and which instructions it uses, or why it is not there."""
    if module is None:
        yield f"native library: missing: {reason}"
        yield "  to build it: install g++, then pip install --no-build-isolation --force-reinstall fastaccum"
        return
    yield "native library:"
    for key, value in module.build_info().items():
        yield f"  {key:<14} {value}"
    yield f"  {'in use':<14} {module.isa()} (this CPU has: {module.isa_available()})"


def report() -> str:
    """What a bug report should hold: versions, switches, build facts, backends with reasons.

    The instruction level in use is among the build facts. It is what ``python -m fastaccum doctor`` prints,
    without the self-test.

    Returns:
        the lines. It raises nothing: what is missing or wrong is told in its place.
    """
    return "\n".join(_lines([], tested=False))


def main(argv: list[str]) -> int:
    """Prints the report and self-tests; exit status 1 if something is wrong.

    That is: a self-test failed, torch is missing, or ``FASTACCUM_BACKEND`` asks for what cannot run.
    """
    parser = argparse.ArgumentParser(prog="python -m fastaccum doctor", description=__doc__)
    parser.parse_args(argv)
    wrong: list[str] = []
    for line in _lines(wrong, tested=True):
        print(line)
    return int(bool(wrong))
