"""Instructions per element of the CPU core's loops, counted by valgrind: the same on a busy machine.

Time is the question, but on a machine that others use it answers with 10 % of noise; a loop that is no longer
vectorised, or reads its arguments again for every element, shows here to the last digit. What does not show:
waiting for memory. The level avx512 is left out, as valgrind 3.19 does not know its instructions.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEVELS = ("avx2", "baseline")


def core() -> Path:
    """The core library of the fastaccum that is imported."""
    import fastaccum

    return Path(fastaccum.__file__).parent / "libfastaccum_core.so"


def compiler() -> str:
    """What the core was compiled with: the counts are as much the compiler's as ours."""
    from fastaccum import dispatch

    module, _ = dispatch.native_module()
    return module.build_info()["compiler"] if module is not None else "none"


def valgrind() -> str:
    """Valgrind's version, without the name in front."""
    shown = subprocess.run(["valgrind", "--version"], capture_output=True, text=True, check=True).stdout
    return shown.strip().removeprefix("valgrind-")


def reason_against() -> str | None:
    """Why nothing can be counted here."""
    for tool in ("valgrind", "g++"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    if not (Path(shutil.which("valgrind")).parent.parent / "include/valgrind/callgrind.h").is_file():
        return "valgrind's headers are not installed"
    if not (ROOT / "csrc").is_dir():
        return "the core's headers are not beside the benchmarks"
    if not core().is_file():
        return "fastaccum was built without native code"
    from fastaccum import dispatch

    module, _ = dispatch.native_module()
    if module is None or "-O3" not in module.build_info()["flags"].split():
        return "fastaccum was not built with -O3"
    return None


def facts() -> dict[str, str]:
    """What the counts depend on."""
    return {"compiler": compiler(), "valgrind": valgrind(), "architecture": platform.machine()}


def build(folder: Path) -> Path:
    """Compiles the driver against the core."""
    program = folder / "hot_loops"
    library = core()
    source = Path(__file__).with_suffix(".cpp")
    command = ["g++", "-std=c++20", "-O2", f"-I{ROOT / 'csrc'}", str(source), "-o", str(program)]
    command += [str(library), f"-Wl,-rpath,{library.parent}"]
    subprocess.run(command, check=True)
    return program


def measure() -> dict[str, float]:
    """Instructions per element: {level/loop: number}."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = ["valgrind", "--tool=callgrind", "--quiet", "--collect-atstart=no"]
        command += [f"--callgrind-out-file={folder / 'out'}", str(build(folder)), *LEVELS]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"valgrind ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
        elements = int(done.stdout)
        return dict(sorted(counted(dump.read_text(), elements) for dump in folder.glob("out.*")))


def counted(dump: str, elements: int) -> tuple[str, float]:
    """The name and the instructions per element of one dump of callgrind's.

    Raises:
        RuntimeError: it is not one of the driver's.
    """
    name = re.search(r"^desc: Trigger: Client Request: (.+)$", dump, re.MULTILINE)
    total = re.search(r"^(?:summary|totals): (\d+)$", dump, re.MULTILINE)
    if not name or not total or int(total[1]) == 0:
        raise RuntimeError(f"callgrind counted nothing, or has a new format:\n{dump[:400]}")
    return name[1], round(int(total[1]) / elements, 4)
