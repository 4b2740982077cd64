"""Checks, without a GPU, that the installed extension brings the CUDA ops to a CUDA build of torch."""

import torch

import fastaccum  # noqa: F401  (loads the extension)
from fastaccum import _C

OPS = ("gather", "norm", "finish", "scale", "adam", "sgd", "store", "upload")

info = _C.build_info()
print(f"torch {torch.__version__} (CUDA {torch.version.cuda}); kernels: {info['cuda'] or info['cuda_note']}")
assert info["cuda"], "the wheel was built without GPU kernels"
assert info["cuda"].split(".")[0] == torch.version.cuda.split(".")[0], "another major version of CUDA"
missing = [
    op for op in OPS if not torch._C._dispatch_has_kernel_for_dispatch_key(f"fastaccum::launch_{op}", "CUDA")
]
assert not missing, f"not registered for CUDA: {missing}"
# What the library links to does not include libtorch_cuda, so its symbol must be found while running.
assert _C.knows_stream(), "torch's current CUDA stream cannot be asked for"
print("all launchers are registered for CUDA")
