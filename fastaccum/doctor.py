"""``python -m fastaccum doctor``: what is here, what runs and why, and whether it computes rightly."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys

from fastaccum._version import __version__

SWITCHES = {
    "FASTACCUM_BACKEND": "what backend='auto' means",
    "FASTACCUM_ISA": "forces an instruction level of the native CPU code",
    "TRITON_INTERPRET": "1 runs the Triton kernels in their interpreter, on the CPU too",
}


def _version_of(module: str) -> str:
    try:
        return str(getattr(importlib.import_module(module), "__version__", "unknown version"))
    except ImportError as error:
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
    error = (train(torch.float32, True) - exact).abs().max().item()
    allowed = 2 * (stock - exact).abs().max().item() + 1e-9
    verdict = "passed" if error <= allowed else "FAILED"
    return f"{verdict} (error {error:.2e}, allowed {allowed:.2e})"


def main(argv: list[str]) -> int:
    """Prints the report; exit status 1 if a self-test failed or torch is missing."""
    parser = argparse.ArgumentParser(prog="python -m fastaccum doctor", description=__doc__)
    parser.parse_args(argv)
    print(f"fastaccum {__version__}   Python {platform.python_version()}   {platform.platform()}")
    for module in ("torch", "triton", "numpy"):
        print(f"{module:<10} {_version_of(module)}")
    for name, effect in SWITCHES.items():
        print(f"{name:<18} {os.environ.get(name, 'not set'):<10} {effect}")
    if "torch" not in sys.modules:
        print("torch is missing: pip install torch, then reinstall fastaccum to build its native code")
        return 1
    import torch

    from fastaccum import dispatch, ops

    module, reason = dispatch.native_module()
    if module is None:
        print(f"\nnative library: missing: {reason}")
        print("  to build it: install g++, then pip install --no-build-isolation --force-reinstall fastaccum")
    else:
        print("\nnative library:")
        for key, value in module.build_info().items():
            print(f"  {key:<14} {value}")
        print(f"  {'in use':<14} {module.isa()} (this CPU has: {module.isa_available()})")
    failed = False
    for device, reasons in dispatch.backends().items():
        chosen = dispatch.choose("auto", torch.device(device))
        print(f"\n{device}: backend 'auto' is {chosen}")
        for op in ops.NAMES:  # a backend has all ops or does not serve the device
            print(f"  {op:<12} {chosen}")
        for name, against in reasons.items():
            if against:
                print(f"  {name:<10} no: {'; '.join(against)}")
            else:
                result = _self_test(name, device)
                failed |= "FAILED" in result
                print(f"  {name:<10} yes; self-test {result}")
    return int(failed)
