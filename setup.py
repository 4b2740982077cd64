"""The whole build of fastaccum's native code; pyproject.toml holds everything else.

Two shared libraries go into the package:

    libfastaccum_core.so   csrc/cpu/*.cpp: no torch, no Python. On x86-64 kernels.cpp is compiled
                           once per instruction level and the level is chosen at run time.
    _C.<abi>.so            csrc/binding.cpp (torch's stable ABI: one build serves torch >= 2.11)
                           and csrc/module.cpp (pybind11: build facts)

This file never imports torch, so that an sdist and the metadata need nothing: torch's headers
are looked up in the target interpreter's site-packages, which pip's build isolation hides from
sys.path only. Switches (environment variables):

    FASTACCUM_NATIVE     auto: build, or a pure Python package where there is no C++ compiler
                         (default) · 1: build or fail · 0: pure Python package
    FASTACCUM_SANITIZE   e.g. address,undefined: instrument both libraries
    FASTACCUM_WERROR=1   warnings are errors
    DEBUG=1              -O1 -g
    CXX                  the compiler, by default the first of g++, c++, clang++
    MAX_JOBS             compilations at a time, by default one per core
"""

import os
import platform
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import BaseError

ROOT = Path(__file__).resolve().parent
OLDEST_TORCH = (2, 11)
CORE = "libfastaccum_core.so"
BINDING = "_C" + sysconfig.get_config_var("EXT_SUFFIX")
NOTE = "_build_note.txt"  # in a package without native code: the reason, shown by `doctor`
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


def why_pure():
    """Returns the reason for building a package without native code, or None."""
    mode = os.environ.get("FASTACCUM_NATIVE", "auto")
    if mode not in ("auto", "0", "1"):
        raise BuildError(f"FASTACCUM_NATIVE must be auto, 0 or 1, not {mode!r}")
    if mode == "0":
        return "built with FASTACCUM_NATIVE=0"
    if mode == "auto" and sys.platform != "linux":
        return f"native code is built on Linux only, not on {sys.platform}"
    if mode == "auto" and find_compiler() is None:
        tried = os.environ.get("CXX") or "g++, c++ and clang++"
        return f"no C++ compiler was found when the package was built (tried {tried})"
    return None


def find_torch():
    """Returns (torch's folder, its version) in the target interpreter; raises if unusable."""
    paths = [*sys.path, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    paths += site.getsitepackages()
    if site.ENABLE_USER_SITE:
        paths.append(site.getusersitepackages())
    folders = list(dict.fromkeys(os.path.realpath(path) for path in paths if os.path.isdir(path)))
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


def variant():
    """Returns the flags that a debug or sanitizer build adds, and a name for its folder."""
    sanitize = os.environ.get("FASTACCUM_SANITIZE", "")
    if sanitize:
        flags = [f"-fsanitize={sanitize}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
        return ["-O1", "-g", *flags], "-" + sanitize.replace(",", "-")
    if os.environ.get("DEBUG") == "1":
        return ["-O1", "-g"], "-debug"
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


def binding_sources(torch, torch_version):
    """Yields (source, object, flags) of the Python extension."""
    # -isystem: no warnings from foreign headers, and no dependency files on them either, so
    # the versions are part of the command: another torch recompiles.
    headers = [f"-isystem{torch / 'include'}"]
    target = (OLDEST_TORCH[0] << 56) | (OLDEST_TORCH[1] << 48)
    stable = [f"-DTORCH_TARGET_VERSION=0x{target:016x}ULL"]
    stable.append(f"-DFASTACCUM_TORCH_VERSION={torch_version}")
    yield ROOT / "csrc/binding.cpp", "binding.o", [*headers, *stable]
    facts = {
        "TORCH_VERSION": torch_version,
        "TORCH_TARGET": ".".join(map(str, OLDEST_TORCH)),
        "LEVELS": ",".join(LEVELS),
        "FLAGS": " ".join(compile_flags()),
    }
    python = f"-isystem{sysconfig.get_path('include')}"
    pybind11 = f"-isystem{find_tool('pybind11').get_include()}"
    defines = [f'-DFASTACCUM_{name}="{value}"' for name, value in facts.items()]
    yield ROOT / "csrc/module.cpp", "module.o", [python, pybind11, *defines]


def ninja_file():
    """Returns the text of build.ninja; its outputs are CORE and BINDING."""
    torch, torch_version = find_torch()

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
    libraries = ["-lfastaccum_core", "-ltorch_cpu", "-lc10"]
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
    units = {"core": core_sources(), "binding": binding_sources(torch, torch_version)}
    for library, sources in units.items():
        for source, name, flags in sources:
            lines += [f"build {name}: compile {path(source)}", f"  own = {escape(flags)}"]
            objects.setdefault(library, []).append(name)
    # A CUDA step goes here: one nvcc edge per csrc/*.cu, its object added to "binding".
    lines += [
        f"build {CORE}: link {' '.join(objects['core'])}",
        f"  own = {escape([*link_core, f'-Wl,-soname,{CORE}'])}",
        f"build {BINDING}: link {' '.join(objects['binding'])} | {CORE}",
        f"  own = {escape(link_binding)}",
        f"  libs = {escape(libraries)}",
    ]
    return "\n".join(lines) + "\n"


class BuildNative(build_ext):
    """Runs ninja in build/native-<interpreter>, which is kept: the next build is incremental."""

    def run(self):
        """Builds both libraries and copies them into the package."""
        if find_compiler() is None:
            tried = os.environ.get("CXX") or "g++, c++ and clang++"
            raise BuildError(
                f"no C++ compiler was found (tried {tried}). Install g++, set CXX, or set "
                "FASTACCUM_NATIVE=0 to build without native code."
            )
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
        for built, target in zip((CORE, BINDING), self.get_outputs(), strict=True):
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
        if subprocess.run(command).returncode:
            raise BuildError(
                "the native build failed: see the compiler's messages above. A C++20 compiler is "
                "needed; FASTACCUM_NATIVE=0 builds without native code."
            )

    def package_folder(self):
        """Returns where the libraries go: the source tree for an editable install."""
        in_place = self.inplace or self.editable_mode
        return ROOT / "fastaccum" if in_place else Path(self.build_lib, "fastaccum")

    def get_outputs(self):
        """Returns the installed files."""
        return [str(self.package_folder() / name) for name in (CORE, BINDING)]

    def get_output_mapping(self):
        """Returns {built file: source file} for editable installs, which link nothing."""
        return {}


class BuildPackage(build_py):
    """Copies the Python files; without native code, leaves a note that holds the reason."""

    def run(self):
        """Starts from an empty folder, so that no file of an earlier build is packed."""
        folder = Path(self.build_lib, "fastaccum")
        if self.editable_mode:
            folder = ROOT / "fastaccum"
            for stale in (*folder.glob("*.so"), folder / NOTE):
                stale.unlink(missing_ok=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
        super().run()
        reason = why_pure()
        if reason:
            print(f"fastaccum: building WITHOUT native code: {reason}", flush=True)
            (folder / NOTE).write_text(reason + "\n")


setup(
    packages=[*find_packages(include=["fastaccum", "fastaccum.*"]), "fastaccum.kernels"],
    package_dir={"fastaccum.kernels": "kernels"},
    # The sources of the extension are ninja's affair; listing it makes the wheel a binary one.
    ext_modules=[] if why_pure() else [Extension("fastaccum._C", sources=[])],
    cmdclass={"build_ext": BuildNative, "build_py": BuildPackage},
)
