"""The whole build of fastaccum's native code; pyproject.toml holds everything else.

Three shared libraries go into the package:

    libfastaccum_core.so   csrc/cpu/*.cpp: no torch, no Python. On x86-64 kernels.cpp is compiled
                           once per instruction level and the level is chosen at run time.
    _C.<abi>.so            csrc/binding.cpp (torch's stable ABI: one build serves torch >= 2.11)
                           and csrc/module.cpp (pybind11: build facts); with a CUDA toolkit also
                           csrc/*.cu (no torch) and csrc/binding_gpu.cpp. CUDA's run time is
                           linked statically: the library loads where there is neither GPU nor
                           CUDA, and the CPU build of torch will do for building it.
    libfastaccum_mindspore.so  csrc/binding_mindspore.cpp: plain C functions, which MindSpore loads
                           as operators; it needs neither MindSpore's headers nor torch.

This file never imports torch, so that an sdist and the metadata need nothing: torch's headers
are looked up in the target interpreter's site-packages, which pip's build isolation hides from
sys.path only. Switches (environment variables):

    FASTACCUM_NATIVE     auto: build, or a pure Python package where there is no C++ compiler
                         (default) · 1: build or fail · 0: pure Python package
    FASTACCUM_CUDA       auto: build the GPU kernels if a usable toolkit is found, else leave them
                         out and keep the reason for `doctor` (default) · 1: build or fail · 0: no
    CUDA_HOME            the toolkit. If it is not set: nvcc on PATH, then that of PyPI's packages
                         (requirements/cuda.txt) in site-packages. CUDA >= 13.0 (12.8 with
                         FASTACCUM_CUDA=1), and of the same major version as torch's if torch is
                         a CUDA build
    FASTACCUM_CUDA_ARCHS the GPUs to compile for, else TORCH_CUDA_ARCH_LIST, else
                         "8.0;9.0;10.0+PTX"; the PTX serves newer ones
    FASTACCUM_SANITIZE   e.g. address,undefined: instrument both libraries, without GPU kernels
    FASTACCUM_WERROR=1   warnings are errors
    DEBUG=1              -O1 -g, and the kernels check their tables
    CXX                  the compiler, by default the first of g++, c++, clang++
    MAX_JOBS             compilations at a time, by default one per core
"""

import json
import os
import platform
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import BaseError

ROOT = Path(__file__).resolve().parent
OLDEST_TORCH = (2, 11)
CORE = "libfastaccum_core.so"
MINDSPORE = "libfastaccum_mindspore.so"
BINDING = "_C" + sysconfig.get_config_var("EXT_SUFFIX")
LIBRARIES = (CORE, BINDING, MINDSPORE)
NOTE = "_build_note.txt"  # what native code was built with, or why there is none; for `doctor`
OLDEST_CUDA = (12, 8)  # the first that knows compute capability 10.0
TRIED_CUDA = (13, 0)  # the oldest that has been tried; an older one is taken only if asked for
OLDEST_ARCH = (8, 0)
ARCHS = "8.0;9.0;10.0+PTX"
X86 = platform.machine().lower() in ("x86_64", "amd64")
LEVELS = {"baseline": []}
if X86:
    LEVELS["avx2"] = ["-mavx2", "-mf16c"]
    LEVELS["avx512"] = [
        *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mf16c"),
        "-mprefer-vector-width=512",
    ]


class BuildError(BaseError):
    """Native code was wanted and cannot be built."""


def find_compiler():
    """Returns the C++ compiler's command as a list, or None."""
    wanted = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++", "clang++"]
    for command in map(shlex.split, wanted):
        if command and shutil.which(command[0]):
            return command
    return None


def switch(name):
    """Returns a switch's value: auto, 0 or 1."""
    mode = os.environ.get(name) or "auto"
    if mode not in ("auto", "0", "1"):
        raise BuildError(f"{name} must be auto, 0 or 1, not {mode!r}")
    return mode


def why_pure():
    """Returns the reason for building a package without native code, or None."""
    mode = switch("FASTACCUM_NATIVE")
    if mode == "0":
        return "built with FASTACCUM_NATIVE=0"
    if mode == "auto" and sys.platform != "linux":
        return f"native code is built on Linux only, not on {sys.platform}"
    if mode == "auto" and find_compiler() is None:
        tried = os.environ.get("CXX") or "g++, c++ and clang++"
        return f"no C++ compiler was found when the package was built (tried {tried})"
    return None


def require_compiler():
    """Raises if there is no C++ compiler: asked first, as nothing that comes after it could help."""
    if find_compiler() is None:
        tried = os.environ.get("CXX") or "g++, c++ and clang++"
        raise BuildError(
            f"no C++ compiler was found (tried {tried}). Install g++, set CXX, or set "
            "FASTACCUM_NATIVE=0 to build without native code."
        )


def package_folders():
    """Returns where the target interpreter's packages may lie."""
    paths = [*sys.path, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    paths += site.getsitepackages()
    if site.ENABLE_USER_SITE:
        paths.append(site.getusersitepackages())
    return list(dict.fromkeys(os.path.realpath(path) for path in paths if os.path.isdir(path)))


def find_torch():
    """Returns (torch's folder, its version) in the target interpreter; raises if unusable."""
    folders = package_folders()
    for folder in folders:
        torch = Path(folder, "torch")
        if not (torch / "include/torch/csrc/stable").is_dir():
            continue
        version = re.search(r"__version__ = '([^']+)'", (torch / "version.py").read_text())[1]
        if tuple(map(int, version.split(".")[:2])) >= OLDEST_TORCH:
            return torch, version
        raise BuildError(f"torch >= 2.11 is required, {torch} is {version}")
    raise BuildError(
        "the C++ headers of torch >= 2.11 (torch/include/torch/csrc/stable) were not found; "
        f"searched {', '.join(folders)}. Install torch first, then fastaccum with "
        "`pip install --no-build-isolation` (after `pip install setuptools pybind11 ninja`), "
        "or set FASTACCUM_NATIVE=0 to build without native code."
    )


def find_tool(module):
    """Imports a build requirement, which only the native build needs."""
    try:
        return __import__(module)
    except ImportError as error:
        raise BuildError(
            f"the native build needs {module}: `pip install setuptools pybind11 ninja` (pip does "
            "it without --no-build-isolation), or set FASTACCUM_NATIVE=0."
        ) from error


class CudaError(Exception):
    """A reason for building without GPU kernels."""


class Toolkit(NamedTuple):
    """A CUDA toolkit that can be used."""

    nvcc: str
    version: str
    include: str
    cudart: str  # the static run-time library
    targets: tuple[str, ...]  # nvcc's -gencode options
    archs: str  # the same in words


def cuda_archs():
    """Returns [(major, minor, suffix, with PTX)] of the wanted GPUs."""
    for name in ("FASTACCUM_CUDA_ARCHS", "TORCH_CUDA_ARCH_LIST"):
        if os.environ.get(name):
            words = os.environ[name]
            break
    else:
        name, words = "the default", ARCHS
    own = name == "FASTACCUM_CUDA_ARCHS"
    archs = []
    for word in re.split(r"[;,\s]+", words.strip("; ,")):
        match = re.fullmatch(r"(\d+)[.](\d)([af]?)([+]PTX)?", word)
        if not match:
            problem = f"{name}={words!r}: {word!r} is not of the form 9.0 or 9.0+PTX"
            raise BuildError(problem) if own else CudaError(problem)
        arch = (int(match[1]), int(match[2]), match[3], bool(match[4]))
        if arch[:2] >= OLDEST_ARCH:
            archs.append(arch)
        elif own:  # torch's list is for everything that is built there, and may name older ones
            raise BuildError(f"{name}={words!r}: GPUs older than 8.0 are not supported")
    if not archs:
        raise CudaError(f"{name}={words!r} holds nothing from 8.0 on")
    return sorted(set(archs))


def nvcc_output(nvcc, *arguments):
    """Runs nvcc; returns what it prints."""
    try:
        done = subprocess.run(
            [nvcc, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CudaError(f"it does not run: {error}") from error
    if done.returncode:
        shown = " ".join(done.stdout.split())[-300:]
        raise CudaError(f"it fails with status {done.returncode}: {shown}")
    return done.stdout


def inspect_toolkit(nvcc, torch):
    """Returns the Toolkit of an nvcc, which has compiled something; raises CudaError."""
    match = re.search(r"release (\d+)[.](\d+), V([\d.]+)", nvcc_output(nvcc, "--version"))
    if not match:
        raise CudaError("it does not tell its version")
    if (int(match[1]), int(match[2])) < OLDEST_CUDA:
        raise CudaError(f"it is CUDA {match[3]}, CUDA >= {OLDEST_CUDA[0]}.{OLDEST_CUDA[1]} is needed")
    if (int(match[1]), int(match[2])) < TRIED_CUDA and switch("FASTACCUM_CUDA") != "1":
        raise CudaError(f"it is CUDA {match[3]}, which has not been tried: FASTACCUM_CUDA=1 builds with it")
    cuda = re.search(r"^cuda\b.*= '(\d+)([^']*)'", (torch / "version.py").read_text(), re.MULTILINE)
    if cuda and cuda[1] != match[1]:
        raise CudaError(f"it is CUDA {match[3]}, torch was built with CUDA {cuda[1]}{cuda[2]}")
    known = set(nvcc_output(nvcc, "--list-gpu-code").split())
    targets, words = [], []
    for major, minor, suffix, with_ptx in cuda_archs():
        name = f"{major}{minor}{suffix}"
        if not {f"sm_{name}", f"sm_{major}{minor}"} & known:  # suffixes may not be listed
            raise CudaError(f"it does not know the GPU {major}.{minor}{suffix}")
        codes = [f"sm_{name}"] + [f"compute_{name}"] * with_ptx
        targets += [f"-gencode=arch=compute_{name},code={code}" for code in codes]
        words.append(f"{major}.{minor}{suffix}" + "+PTX" * with_ptx)
    # nvcc on PATH may be a link or a script, and toolkits lay their files out in several ways: its own
    # search paths are the truth.
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cu")
        source.write_text("#include <cuda_runtime.h>\n__global__ void probe(int* p) { *p = 1; }\n")
        told = nvcc_output(nvcc, "--dryrun", "-c", str(source), "-o", f"{source}.o")
        nvcc_output(nvcc, *nvcc_flags(), targets[0], "-c", str(source), "-o", f"{source}.o")

    def search(kind, option, file):
        line = re.search(rf"^#[$] {kind}=(.*)$", told, re.MULTILINE)
        paths = [word[2:] for word in shlex.split(line[1] if line else "") if word.startswith(option)]
        top = re.search(r"^#[$] TOP=(.*)$", told, re.MULTILINE)
        if top:
            paths += [f"{top[1].strip()}/{part}" for part in ("include", "lib64", "lib")]
        for path in paths:
            if Path(path, file).is_file():
                return os.path.realpath(path)
        raise CudaError(f"it comes without {file} (searched {', '.join(paths) or 'nothing'})")

    include = search("INCLUDES", "-I", "cuda_runtime.h")
    cudart = search("LIBRARIES", "-L", "libcudart_static.a") + "/libcudart_static.a"
    return Toolkit(nvcc, match[3], include, cudart, tuple(targets), ";".join(words))


def find_toolkit(torch):
    """Returns (the Toolkit or None, the reason if it is None); raises if FASTACCUM_CUDA=1 cannot be met."""
    mode = switch("FASTACCUM_CUDA")
    if mode == "0":
        return None, "built with FASTACCUM_CUDA=0"
    if os.environ.get("FASTACCUM_SANITIZE"):
        return None, "sanitizer builds leave the GPU kernels out"
    home = os.environ.get("CUDA_HOME")
    if home:
        candidates = [os.path.join(home, "bin", "nvcc")]
    else:
        candidates = [shutil.which("nvcc")]
        for folder in package_folders():
            candidates += sorted(map(str, Path(folder).glob("nvidia/cu*/bin/nvcc")), reverse=True)
    reasons = []
    for nvcc in filter(None, candidates):
        try:
            return inspect_toolkit(nvcc, torch), ""
        except CudaError as error:
            reasons.append(f"{nvcc}: {error}")
    reason = "; ".join(reasons) or (
        "no CUDA toolkit was found when the package was built (CUDA_HOME is not set, no nvcc on PATH or "
        "in site-packages/nvidia)"
    )
    if mode == "1":
        raise BuildError(f"FASTACCUM_CUDA=1, but {reason}")
    print(f"fastaccum: building WITHOUT GPU kernels: {reason}", flush=True)
    return None, reason


def nvcc_flags():
    """Returns the flags of every .cu file, as strict as the CPU's."""
    level, debug = ("-O1", ["-g", "-lineinfo", "-DFASTACCUM_DEBUG"]) if variant()[1] else ("-O3", [])
    # Host and device: no fused multiply-add that is not written as one.
    flags = ["-std=c++20", "-fmad=false", level, *debug]
    flags.append("-Xcompiler=-fPIC,-fvisibility=hidden,-ffp-contract=off,-Wall")
    compiler = find_compiler()
    if len(compiler) == 1 and not os.environ.get("NVCC_CCBIN"):  # not e.g. `ccache g++`
        flags.append(f"-ccbin={shutil.which(compiler[0])}")
    if os.environ.get("FASTACCUM_WERROR") == "1":
        flags += ["-Werror=all-warnings", "-Xcompiler=-Werror"]
    return flags


def variant():
    """Returns the flags that a debug or sanitizer build adds, and a name for its folder."""
    sanitize = os.environ.get("FASTACCUM_SANITIZE", "")
    if sanitize:
        flags = [f"-fsanitize={sanitize}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
        return ["-O1", "-g", *flags], "-" + sanitize.replace(",", "-")
    if os.environ.get("DEBUG") == "1":
        return ["-O1", "-g", "-DFASTACCUM_DEBUG"], "-debug"
    return ["-O3"], ""


def compile_flags():
    """Returns the flags of every C++ file: strict IEEE arithmetic, no machine of its own."""
    flags = ["-std=c++20", *variant()[0], "-fPIC", "-fvisibility=hidden", "-pthread"]
    # No fused multiply-add and no reassociation: all levels and backends are bit-equal.
    flags += ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra"]
    return flags + ["-Werror"] * (os.environ.get("FASTACCUM_WERROR") == "1")


def core_sources():
    """Yields (source, object, flags) of the torch-free core."""
    common = ["-DFASTACCUM_X86_LEVELS=1"] * X86
    for source in sorted((ROOT / "csrc/cpu").glob("*.cpp")):
        levels = LEVELS if source.name == "kernels.cpp" else {"baseline": []}
        for level, flags in levels.items():
            # Only the file that is compiled per level may know its level.
            name = [f"-DFASTACCUM_ISA={level}"] if levels is LEVELS else []
            suffix = f".{level}" if levels is LEVELS else ""
            yield source, f"core/{source.stem}{suffix}.o", [*common, *name, *flags]


def binding_sources(torch, torch_version, toolkit, no_cuda):
    """Yields (source, object, flags) of the Python extension's C++ files."""
    # -isystem: no warnings from foreign headers, and no dependency files on them either, so
    # the versions are part of the command: another torch recompiles.
    headers = [f"-isystem{torch / 'include'}"]
    target = (OLDEST_TORCH[0] << 56) | (OLDEST_TORCH[1] << 48)
    stable = [f"-DTORCH_TARGET_VERSION=0x{target:016x}ULL"]
    stable.append(f"-DFASTACCUM_TORCH_VERSION={torch_version}")
    yield ROOT / "csrc/binding.cpp", "binding.o", [*headers, *stable]
    if toolkit and (ROOT / "csrc/binding_gpu.cpp").exists():
        cuda = [f"-isystem{toolkit.include}", f"-DFASTACCUM_WITH_CUDA={toolkit.version}"]
        yield ROOT / "csrc/binding_gpu.cpp", "binding_gpu.o", [*headers, *stable, *cuda]
    facts = {
        "TORCH_VERSION": torch_version,
        "TORCH_TARGET": ".".join(map(str, OLDEST_TORCH)),
        "LEVELS": ",".join(LEVELS),
        "FLAGS": " ".join(compile_flags()),
        "CUDA": toolkit.version if toolkit else "",
        "CUDA_ARCHS": toolkit.archs if toolkit else "",
        "CUDA_NOTE": no_cuda,
    }
    python = f"-isystem{sysconfig.get_path('include')}"
    pybind11 = f"-isystem{find_tool('pybind11').get_include()}"
    defines = [f"-DFASTACCUM_{name}={json.dumps(value)}" for name, value in facts.items()]
    yield ROOT / "csrc/module.cpp", "module.o", [python, pybind11, *defines]


def ninja_file():
    """Returns the text of build.ninja; its outputs are CORE, BINDING and MINDSPORE."""
    torch, torch_version = find_torch()
    toolkit, no_cuda = find_toolkit(torch)

    def escape(words):
        return shlex.join(map(str, words)).replace("$", "$$")

    def path(name):
        return str(name).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")

    link = [*variant()[0], "-shared", "-pthread", "-Wl,--as-needed"]
    if not os.environ.get("FASTACCUM_SANITIZE"):  # a sanitizer's functions are found at run time
        link_core = [*link, "-Wl,-z,defs"]
    else:
        link_core = link
    link_binding = [*link, "-L.", "-Wl,-rpath,$ORIGIN", f"-L{torch / 'lib'}"]
    libraries = ["-lfastaccum_core", "-ltorch_cpu", "-lc10", "-ldl"]
    if toolkit:
        # Its functions must not be found by, or instead of, those of another copy in the process.
        link_binding.append("-Wl,--exclude-libs,libcudart_static.a")
        libraries += [toolkit.cudart, "-lrt", "-lpthread"]
    lines = [
        "ninja_required_version = 1.5",
        f"cxx = {escape(find_compiler())}",
        f"flags = {escape([*compile_flags(), '-I' + str(ROOT / 'csrc')])}",
        "rule compile",
        "  command = $cxx -MMD -MF $out.d $flags $own -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = $out",
        "rule link",
        "  command = $cxx $own $in -o $out $libs",
        "  description = $out",
    ]
    objects = {}
    binding = binding_sources(torch, torch_version, toolkit, no_cuda)
    mindspore = [(ROOT / "csrc/binding_mindspore.cpp", "binding_mindspore.o", [])]
    units = {"core": core_sources(), "binding": binding, "mindspore": mindspore}
    for library, sources in units.items():
        for source, name, flags in sources:
            lines += [f"build {name}: compile {path(source)}", f"  own = {escape(flags)}"]
            objects.setdefault(library, []).append(name)
    if toolkit:
        # The version is in the command, so that another toolkit recompiles.
        version = f"-DFASTACCUM_TOOLKIT={toolkit.version}"
        flags = [*nvcc_flags(), *toolkit.targets, version, f"-I{ROOT / 'csrc'}"]
        lines += [
            f"nvcc = {escape([toolkit.nvcc])}",
            f"nvcc_flags = {escape(flags)}",
            "rule nvcc",
            "  command = $nvcc -MMD -MF $out.d $nvcc_flags -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
            "  description = $out",
        ]
        for source in sorted((ROOT / "csrc").glob("*.cu")):
            lines.append(f"build cuda/{source.stem}.o: nvcc {path(source)}")
            objects["binding"].append(f"cuda/{source.stem}.o")
    lines += [
        f"build {CORE}: link {' '.join(objects['core'])}",
        f"  own = {escape([*link_core, f'-Wl,-soname,{CORE}'])}",
        f"build {BINDING}: link {' '.join(objects['binding'])} | {CORE}",
        f"  own = {escape(link_binding)}",
        f"  libs = {escape(libraries)}",
        f"build {MINDSPORE}: link {' '.join(objects['mindspore'])} | {CORE}",
        f"  own = {escape([*link_core, '-L.', '-Wl,-rpath,$ORIGIN'])}",
        "  libs = -lfastaccum_core",
    ]
    return "\n".join(lines) + "\n"


class BuildNative(build_ext):
    """Runs ninja in build/native-<interpreter>, which is kept: the next build is incremental."""

    def run(self):
        """Builds the libraries and copies them into the package."""
        require_compiler()
        python_h = Path(sysconfig.get_path("include"), "Python.h")
        if not python_h.is_file():
            raise BuildError(
                f"{python_h} is missing: install Python's development headers (Debian: "
                "python3-dev), or set FASTACCUM_NATIVE=0 to build without native code."
            )
        where = ROOT / f"build/native-{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
        where = where.with_name(where.name + variant()[1])
        where.mkdir(parents=True, exist_ok=True)
        text = ninja_file()
        if not (where / "build.ninja").exists() or (where / "build.ninja").read_text() != text:
            (where / "build.ninja").write_text(text)
        self.ninja(where)
        for built, target in zip(LIBRARIES, self.get_outputs(), strict=True):
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            # A new inode: a process that runs the old library keeps it.
            Path(target).unlink(missing_ok=True)
            shutil.copy2(where / built, target)

    def ninja(self, where):
        """Compiles what has changed; the compiler's messages go to the output."""
        command = [os.path.join(find_tool("ninja").BIN_DIR, "ninja"), "-C", str(where)]
        if os.environ.get("MAX_JOBS"):
            command += ["-j", os.environ["MAX_JOBS"]]
        else:
            command += ["-j", str(len(os.sched_getaffinity(0)))]
        print("fastaccum:", shlex.join(find_compiler() + compile_flags()), flush=True)
        started = time.monotonic()
        if subprocess.run(command).returncode:
            raise BuildError(
                "the native build failed: see the compiler's messages above. A C++20 compiler is "
                "needed; FASTACCUM_CUDA=0 builds without GPU kernels, FASTACCUM_NATIVE=0 without native "
                "code."
            )
        print(f"fastaccum: native build took {time.monotonic() - started:.1f} s", flush=True)

    def package_folder(self):
        """Returns where the libraries go: the source tree for an editable install."""
        in_place = self.inplace or self.editable_mode
        return ROOT / "fastaccum" if in_place else Path(self.build_lib, "fastaccum")

    def get_outputs(self):
        """Returns the installed files."""
        return [str(self.package_folder() / name) for name in LIBRARIES]

    def get_output_mapping(self):
        """Returns {built file: source file} for editable installs, which link nothing."""
        return {}


class BuildPackage(build_py):
    """Copies the Python files; leaves a note of what native code is built with, or why there is none."""

    def run(self):
        """Starts from an empty folder, so that no file of an earlier build is packed."""
        reason = why_pure()
        if not reason:
            require_compiler()
        folder = Path(self.build_lib, "fastaccum")
        if self.editable_mode:
            folder = ROOT / "fastaccum"
            for stale in (*folder.glob("*.so"), folder / NOTE):
                stale.unlink(missing_ok=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
        super().run()
        if reason:
            print(f"fastaccum: building WITHOUT native code: {reason}", flush=True)
        (folder / NOTE).write_text(f"{reason or 'built with torch ' + find_torch()[1]}\n")


setup(
    packages=[*find_packages(include=["fastaccum", "fastaccum.*"]), "fastaccum.kernels"],
    package_dir={"fastaccum.kernels": "kernels"},
    # The sources of the extension are ninja's affair; listing it makes the wheel a binary one.
    ext_modules=[] if why_pure() else [Extension("fastaccum._C", sources=[])],
    cmdclass={"build_ext": BuildNative, "build_py": BuildPackage},
)
