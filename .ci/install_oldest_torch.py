"""Installs torch 2.11.0 for CPU work, without gigabytes of CUDA libraries.

usage: install_oldest_torch.py PYTHON (of an empty virtual environment)

Where only the CUDA wheel of a release is on offer, the loader wants every CUDA library that it
links, although nothing on the CPU calls them. The small ones are installed; each other one is
replaced by a library of the same name whose functions return an error code.
"""

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

TORCH = "2.11.0"
# What a CPU run needs of torch's requirements, and the CUDA libraries that it does call.
LIGHT = ["filelock", "fsspec", "jinja2", "networkx", "sympy", "typing-extensions>=4.10"]
CUDA = ["nvidia-cuda-cupti==13.0.85", "nvidia-cuda-runtime==13.0.96"]
FAMILIES = re.compile(r"_?(cublas|cudnn|cufft|cuFile|curand|cusparse|nccl|nvshmem)")


def output_of(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main():
    python = sys.argv[1]
    pip = [python, "-m", "pip", "install", "--quiet", "--no-input"]
    subprocess.run([*pip, "--no-deps", f"torch=={TORCH}"], check=True)
    subprocess.run([*pip, *LIGHT], check=True)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site_packages = Path(output_of(python, "-c", where).strip())
    libraries = list((site_packages / "torch/lib").glob("*.so"))
    needed, versioned, plain = set(), defaultdict(set), set()
    for library in libraries:
        dynamic = output_of("readelf", "-d", library)
        needed.update(re.findall(r"NEEDED.*\[(lib(?:cu|nv|nccl)\S+)\]", dynamic))
        for line in output_of("nm", "-D", "--undefined-only", library).splitlines():
            symbol, _, version = line.split()[-1].partition("@")
            if version.startswith("lib"):
                versioned[version].add(symbol)
            elif FAMILIES.match(symbol):
                plain.add(symbol)
    if not needed:
        print(f"torch {TORCH} is a CPU build")
        return
    subprocess.run([*pip, "--no-deps", *CUDA], check=True)
    (folder,) = site_packages.glob("nvidia/cu*/lib")
    # Never the driver: its absence is how torch knows that there is no GPU.
    stubs = sorted(n for n in needed - {"libcuda.so.1"} if not (folder / n).exists())
    for name in stubs:
        script = folder / f"{name}.map"
        version = name if versioned[name] else ""
        script.write_text(f"{version} {{ global: *; }};\n")
        source = "".join(f"int {f}(void) {{ return 1; }}\n" for f in versioned[name] | plain)
        options = ["-w", "-shared", "-fPIC", "-fno-builtin", f"-Wl,-soname,{name}"]
        options += [f"-Wl,--version-script={script}", "-o", str(folder / name)]
        subprocess.run(["gcc", *options, "-x", "c", "-"], input=source, text=True, check=True)
    print(f"torch {TORCH} with stand-ins for {', '.join(stubs)}")


if __name__ == "__main__":
    main()
