"""Compiles kernel files for the CPU, with the run time of cuda_on_cpu, into a library or a program.

Objects are kept by a hash of their flags, with the hashes of every file they were made from: a rebuild
compiles only what has changed. Any number of processes may build at once.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent.parent / "build" / "cuda_on_cpu"
CXX = shlex.split(os.environ.get("CXX", "g++"))
AVAILABLE = shutil.which(CXX[0]) is not None

RUNTIME = [HERE / f"{name}.cpp" for name in ("fibers", "launch", "memory", "races", "host")]
WARNINGS = ["-Wall", "-Wextra", "-Wno-psabi", "-Wno-unknown-pragmas"]  # #pragma unroll is for nvcc
COMMON = ["-std=c++20", "-g", "-fPIC", *WARNINGS, "-DFASTACCUM_CUDA_ON_CPU", f"-I{HERE}"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
# Of kernel files (.cu) and of the rest. At -O1 the compiler splits wide loads before it instruments
# them, so that races needs -O0. Host code has no hooks: it may run beside a kernel.
MODES = {
    "plain": (["-O2"], ["-O1"]),
    "sanitize": (["-O1", *SANITIZERS], ["-O1", *SANITIZERS]),
    "races": (["-O0", "-fsanitize=thread"], ["-O1"]),
}
# Kernels are held to the bits of separate products and sums.
KERNEL = ["-ffp-contract=off", "-x", "c++"]

_jobs = threading.BoundedSemaphore(len(os.sched_getaffinity(0)))
_lock = threading.Lock()
_locks: dict[str, threading.Lock] = {}  # of objects
_hashes: dict[tuple[str, int, int], str] = {}


def build(
    sources: Iterable[Path | str | tuple[Path, Iterable[str]]],
    mode: str,
    output: str,
    includes: Iterable[Path | str] = (),
    defines: Iterable[str] = (),
    extra: Iterable[str] = (),
    ucontext: bool = False,
) -> Path:
    """Builds `output` (.so: a library, else a program; relative to build/cuda_on_cpu) and returns its path.

    `mode` is plain, sanitize or races (see cuda_on_cpu.h). A source may come with defines of its own.
    Of `extra`, flags that begin with -l, -L or -Wl go to the linker, others to the compiler. A library
    in mode sanitize needs the sanitizers' libraries first in the process. `ucontext`: switch between
    threads as on processors that fibers.cpp has no assembly for.
    """
    kernel_flags, host_flags = MODES[mode]
    extra = list(extra)
    link_only = [flag for flag in extra if flag.startswith(("-l", "-L", "-Wl"))]
    flags = [*COMMON, *(f"-I{path}" for path in includes), *(f"-D{name}" for name in defines)]
    flags += [flag for flag in extra if flag not in link_only]
    if _is_gcc():
        flags.append("-fno-gnu-unique")  # __shared__ of a template: one for each library, not for the process
    jobs = [(path, [*COMMON, "-O2"]) for path in RUNTIME]
    if ucontext:
        jobs[0][1].append("-DFASTACCUM_FIBERS_UCONTEXT")
    for source in sources:
        path, own = source if isinstance(source, tuple) else (source, ())
        path = Path(path).resolve()
        of_kind = [*kernel_flags, *KERNEL] if path.suffix == ".cu" else host_flags
        jobs.append((path, [*flags, *of_kind, *(f"-D{name}" for name in own)]))
    with ThreadPoolExecutor(len(jobs)) as pool:
        objects = list(pool.map(lambda job: _compile(*job), jobs))

    target = BUILD / output
    link = [*(SANITIZERS if mode == "sanitize" else []), *link_only, "-ldl", "-lpthread"]
    if target.suffix == ".so":
        link = ["-shared", "-Wl,-Bsymbolic", *link]
    command = [*CXX, *map(str, objects), *link]
    stamp = target.with_name(target.name + ".json")
    wanted = _digest(json.dumps([command, [_hash_of(path) for path in objects]]))
    if not (target.exists() and stamp.exists() and stamp.read_text() == wanted):
        target.parent.mkdir(parents=True, exist_ok=True)
        _make(command, target)
        _replace(stamp, wanted)
    return target


def _compile(source: Path, flags: list[str]) -> Path:
    key = _digest(json.dumps([_compiler(), str(source), flags]))
    with _lock:
        one_at_a_time = _locks.setdefault(key, threading.Lock())
    with one_at_a_time:
        return _compile_once(source, flags, key)


def _compile_once(source: Path, flags: list[str], key: str) -> Path:
    target = BUILD / "objects" / f"{source.stem}-{key[:20]}.o"
    record = target.with_suffix(".json")
    if target.exists() and record.exists():
        made_from = json.loads(record.read_text())
        if all(_hash_of(path) == digest for path, digest in made_from.items()):
            return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(suffix=".d") as dependencies:
        _make([*CXX, *flags, "-MMD", "-MF", dependencies.name, "-c", str(source)], target)
        listed = Path(dependencies.name).read_text().replace("\\\n", " ").split(":", 1)[1]
    paths = [str(Path(path).resolve()) for path in shlex.split(listed)]
    _replace(record, json.dumps({path: _hash_of(path) for path in paths}))
    return target


def _make(command: list[str], target: Path) -> None:
    """Runs the compiler; the result appears at once and whole, whoever else makes the same."""
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")
    os.close(handle)
    try:
        with _jobs:
            done = subprocess.run([*command, "-o", temporary], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")
        os.chmod(temporary, 0o755)
        os.replace(temporary, target)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _replace(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.replace(temporary, path)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _hash_of(path: Path | str) -> str | None:
    """The hash of a file's content; None if there is no such file."""
    try:
        status = os.stat(path)
        key = (str(path), status.st_mtime_ns, status.st_size)
        if key not in _hashes:
            _hashes[key] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except FileNotFoundError:
        return None
    return _hashes[key]


@functools.cache
def _compiler() -> str:
    return subprocess.run([*CXX, "--version"], capture_output=True, text=True, check=True).stdout


def _is_gcc() -> bool:
    return "clang" not in _compiler()
