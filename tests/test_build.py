"""The build: what it needs, what it packs, how it fails, and what is in the libraries.

Most tests drive setup.py in a copy of the tree whose native sources are a few lines long, in an
interpreter that has the build tools but neither torch nor pip.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
NATIVE = {
    "fastaccum/libfastaccum_core.so",
    "fastaccum/libfastaccum_mindspore.so",
    f"fastaccum/_C{SUFFIX}",
}
BUILD_TOOLS = ("setuptools", "pybind11", "ninja")
HOOK = "import sys, setuptools.build_meta as meta; getattr(meta, sys.argv[1])(sys.argv[2])"

needs_sources = pytest.mark.skipif(
    not (ROOT / "setup.py").exists() or any(not importlib.util.find_spec(m) for m in BUILD_TOOLS),
    reason=f"needs the source tree and {', '.join(BUILD_TOOLS)}",
)
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

TINY_SOURCES = {
    "cpu/core.h": """
        namespace tiny { __attribute__((visibility("default"))) int answer(); }
    """,
    "cpu/core.cpp": """
        #include "core.h"
        int tiny::answer() { return 42; }
    """,
    "cpu/kernels.cpp": """
        #include "core.h"
        namespace tiny::FASTACCUM_ISA { int run() { return 1; } }
    """,
    "binding.cpp": """
        #include <torch/csrc/stable/version.h>
        #include "cpu/core.h"
        int anchor() { return tiny::answer(); }
    """,
    "binding_mindspore.cpp": """
        #include "cpu/core.h"
        extern "C" __attribute__((visibility("default"))) int operation() { return tiny::answer(); }
    """,
    "module.cpp": """
        #include <Python.h>
        PyMODINIT_FUNC PyInit__C() { return nullptr; }
    """,
}


@pytest.fixture
def tree(tmp_path):
    """A copy of the source tree with small native sources."""
    copy = tmp_path / "tree"
    ignored = shutil.ignore_patterns("*.so", "_build_note.txt", "__pycache__", "*.egg-info")
    for name in ("fastaccum", "kernels", "csrc", "tests", "benchmarks", "requirements", "docs"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for file in ROOT.iterdir():
        if file.is_file():
            shutil.copy(file, copy)
    for source in (copy / "csrc/cpu").glob("*.cpp"):
        source.unlink()
    for source in [*(copy / "csrc").glob("*.cu"), copy / "csrc/binding_gpu.cpp"]:
        source.unlink()  # the kernels take minutes; tests/test_build_cuda.py builds some
    for name, text in TINY_SOURCES.items():
        (copy / "csrc" / name).write_text(text)
    return copy


@pytest.fixture(scope="session")
def bare_python(tmp_path_factory):
    """An interpreter without torch, and folders that hold the build tools for PYTHONPATH."""
    root = tmp_path_factory.mktemp("bare")
    venv.create(root / "venv", symlinks=True, with_pip=False)
    for module in BUILD_TOOLS:
        folder = root / module
        folder.mkdir()
        site_packages = Path(importlib.util.find_spec(module).origin).parent.parent
        parts = [module, *(path.name for path in site_packages.glob(f"{module}-*.dist-info"))]
        for part in [*parts, "_distutils_hack"] if module == "setuptools" else parts:
            (folder / part).symlink_to(site_packages / part, target_is_directory=True)
    return root


def run_hook(hook, tree, out, *, python=sys.executable, **environment):
    """Calls a hook of the build backend; returns the finished process."""
    switches = ("FASTACCUM_", "CXX", "DEBUG", "PYTHONPATH", "MAX_JOBS")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(switches)}
    out.mkdir(exist_ok=True)
    return subprocess.run(
        [str(python), "-c", HOOK, hook, str(out)],
        cwd=tree,
        env={**clean, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_bare(hook, tree, out, bare, *, tools=BUILD_TOOLS, **environment):
    path = os.pathsep.join(str(bare / tool) for tool in tools)
    python = bare / "venv/bin/python"
    return run_hook(hook, tree, out, python=python, PYTHONPATH=path, **environment)


def only(folder, pattern):
    (found,) = folder.glob(pattern)
    return found


@needs_sources
def test_b02_sdist_needs_setuptools_only_and_holds_every_source(tree, bare_python, tmp_path):
    (tree / "fastaccum/stale.so").touch()
    result = run_bare("build_sdist", tree, tmp_path / "out", bare_python, tools=["setuptools"])
    assert result.returncode == 0, result.stdout
    with tarfile.open(only(tmp_path / "out", "*.tar.gz")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"setup.py", "pyproject.toml", "LICENSE", "README.md", "fastaccum/py.typed"} <= names
    assert "mkdocs.yml" in names  # make docs works there
    for pattern in ("csrc/**/*.h", "csrc/**/*.cpp", "fastaccum/**/*.py", "kernels/*.py", "docs/*"):
        assert {str(path.relative_to(tree)) for path in tree.glob(pattern)} <= names
    assert not [name for name in names if name.endswith(".so")]


@needs_sources
def test_b02_metadata_needs_setuptools_only(tree, bare_python, tmp_path):
    hook = "prepare_metadata_for_build_wheel"
    result = run_bare(hook, tree, tmp_path / "out", bare_python, tools=["setuptools"])
    assert result.returncode == 0, result.stdout
    metadata = only(tmp_path / "out", "*.dist-info/METADATA").read_text()
    required = re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)
    assert [line for line in required if "extra ==" not in line] == ["torch>=2.11"]
    assert not [line for line in required[1:] if line.startswith("torch")]


@needs_sources
@needs_compiler
def test_b02_missing_torch_headers_fail_and_say_what_to_do(tree, bare_python, tmp_path):
    result = run_bare("build_wheel", tree, tmp_path / "out", bare_python)
    assert result.returncode != 0
    site_packages = only(bare_python / "venv/lib", "*/site-packages")
    for word in ("--no-build-isolation", "FASTACCUM_NATIVE=0", "torch/csrc/stable"):
        assert word in result.stdout
    assert str(site_packages.resolve()) in result.stdout
    assert not list((tmp_path / "out").glob("*.whl"))


@needs_sources
@needs_compiler
def test_torch_that_is_too_old_is_named(tree, bare_python, tmp_path):
    old = tmp_path / "old/torch"
    (old / "include/torch/csrc/stable").mkdir(parents=True)
    (old / "version.py").write_text("__version__ = '2.9.1+cpu'\n")
    tools = [*BUILD_TOOLS, old.parent]
    result = run_bare("build_wheel", tree, tmp_path / "out", bare_python, tools=tools)
    assert result.returncode != 0
    assert "torch >= 2.11 is required" in result.stdout and "2.9.1+cpu" in result.stdout


@needs_sources
@pytest.mark.parametrize(
    ("switch", "reason"),
    [
        ({"CXX": "/nonexistent/g++"}, "no C[+][+] compiler was found .*tried /nonexistent/g[+][+]"),
        ({"PATH": "/nonexistent"}, "no C[+][+] compiler was found .*tried g[+][+], "),
        ({"FASTACCUM_NATIVE": "0"}, "FASTACCUM_NATIVE=0"),
    ],
    ids=["cxx", "path", "switch"],
)
def test_pure_wheel_holds_its_reason(tree, bare_python, tmp_path, switch, reason):
    (tree / "fastaccum/stale.so").touch()
    result = run_bare("build_wheel", tree, tmp_path / "out", bare_python, **switch)
    assert result.returncode == 0, result.stdout
    assert re.search(f"WITHOUT native code: .*{reason}", result.stdout)
    wheel = only(tmp_path / "out", "*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]
        assert re.search(reason, archive.read("fastaccum/_build_note.txt").decode())
    assert not (tree / "fastaccum/_build_note.txt").exists()


@needs_sources
@pytest.mark.parametrize(
    ("switches", "words"),
    [
        ({"FASTACCUM_NATIVE": "1", "CXX": "/nonexistent/g++"}, "tried /nonexistent/g++"),
        ({"FASTACCUM_NATIVE": "yes"}, "FASTACCUM_NATIVE must be auto, 0 or 1, not 'yes'"),
    ],
    ids=["no compiler", "bad value"],
)
def test_native_switch_is_strict(tree, bare_python, tmp_path, switches, words):
    result = run_bare("build_wheel", tree, tmp_path / "out", bare_python, **switches)
    assert result.returncode != 0 and words in result.stdout, result.stdout


@needs_sources
@needs_compiler
def test_native_wheel_and_its_incremental_rebuild(tree, tmp_path):
    assert run_hook("build_wheel", tree, tmp_path / "warm").returncode == 0
    wheel = only(tmp_path / "warm", "*.whl")
    assert not wheel.name.endswith("-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    packed = {name for name in names if name.startswith("fastaccum/")}
    python = {str(path.relative_to(tree)) for path in tree.glob("fastaccum/**/*.py")}
    python |= {f"fastaccum/{path.relative_to(tree)}" for path in tree.glob("kernels/*.py")}
    assert packed == python | NATIVE | {"fastaccum/py.typed", "fastaccum/_build_note.txt"}
    assert all(".dist-info/" in name for name in names - packed)

    def compiled():
        return {path: path.stat().st_mtime_ns for path in tree.glob("build/native-*/**/*.o")}

    before = compiled()
    (tree / "fastaccum/added.py").touch()
    assert run_hook("build_wheel", tree, tmp_path / "again").returncode == 0
    assert compiled() == before
    (tree / "csrc/cpu/core.h").write_text(TINY_SOURCES["cpu/core.h"] + "// changed\n")
    assert run_hook("build_wheel", tree, tmp_path / "changed").returncode == 0
    kept = {path.name for path, time in compiled().items() if before[path] == time}
    assert kept == {"module.o"}  # the one file that does not include the header


@needs_sources
@needs_compiler
def test_compile_error_shows_the_compilers_words(tree, tmp_path):
    (tree / "csrc/cpu/core.cpp").write_text("#error planted\n")
    result = run_hook("build_wheel", tree, tmp_path / "out")
    assert result.returncode != 0
    assert "planted" in result.stdout and "FASTACCUM_NATIVE=0" in result.stdout


# The libraries that are installed here.


def installed(name):
    folder = Path(importlib.util.find_spec("fastaccum").origin).parent
    if not (folder / name).exists():
        pytest.skip(f"fastaccum is installed without native code ({name} is missing)")
    return folder / name


def output_of(*command):
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def wide_instructions(library):
    """Counts AVX instructions per instruction level, and per function that has no level."""
    listing = output_of("objdump", "-d", "-C", "--no-show-raw-insn", str(library))
    levels, strays, function = Counter(), Counter(), ""
    for line in listing.splitlines():
        if header := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            function = header[1]
        elif code := re.match(r" +[0-9a-f]+:\t(\w+)(.*)", line):
            # VEX and EVEX mnemonics begin with v, whatever the width; so do verr and verw.
            if not code[1].startswith("v") or code[1] in ("verr", "verw"):
                continue
            level = re.search(r"::(avx2|avx512)::", function)
            if level is None or (level[1] == "avx2" and "%zmm" in code[2]):
                strays[function] += 1
            else:
                levels[level[1]] += 1
    return levels, strays


@pytest.mark.skipif(not sysconfig.get_platform().endswith("x86_64"), reason="x86-64 only")
def test_b05_wide_instructions_stay_in_their_level():
    # A template that the linker merges, or a static initialiser, would fail on an older CPU.
    levels, strays = wide_instructions(installed("libfastaccum_core.so"))
    assert not strays
    assert levels["avx2"] > 0 and levels["avx512"] > 0
    assert wide_instructions(installed(f"_C{SUFFIX}")) == (Counter(), Counter())


@needs_compiler
def test_b04_a_library_that_cannot_be_loaded_is_told_of_and_not_used(tmp_path):
    """As one built against another torch or libstdc++: a symbol is missing when it is loaded."""
    folder = Path(importlib.util.find_spec("fastaccum").origin).parent
    shutil.copytree(folder, tmp_path / "fastaccum", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (tmp_path / "fastaccum/_build_note.txt").write_text("built with torch 2.10.0\n")
    (tmp_path / "module.cpp").write_text(
        "void of_another_torch();\n"
        'extern "C" __attribute__((visibility("default"))) void* PyInit__C()'
        " { of_another_torch(); return nullptr; }\n"
    )
    library = tmp_path / f"fastaccum/_C{SUFFIX}"
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, tmp_path / "module.cpp"], check=True)
    result = subprocess.run(
        [sys.executable, "-c", TRAINS_WITHOUT],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONWARNINGS": "always"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout
    (warning,) = [line for line in result.stdout.splitlines() if "RuntimeWarning" in line]
    for text in (warning, *re.findall("^(?:reason|refused): .*", result.stdout, re.MULTILINE)):
        for word in ("of_another_torch", "built with torch 2.10.0", "this torch 2.", "--no-build-isolation"):
            assert word in text
    assert result.stdout.count("\nreason: ") == result.stdout.count("\nrefused: ") == 1
    assert result.stdout.splitlines()[-1] == "reference [-1.0, -2.0]"


TRAINS_WITHOUT = """
import torch
from fastaccum import FusedAccumulator, backends, dispatch
print("\\nreason:", *backends()["cpu"]["native"])
p = torch.nn.Parameter(torch.zeros(2))
try:
    FusedAccumulator(torch.optim.SGD([p]), backend="native")
except RuntimeError as error:
    print("refused:", error)
optimizer = FusedAccumulator(torch.optim.SGD([p], lr=1.0), 2)
for grad in ([1.0, 3.0], [1.0, 1.0]):
    p.grad = torch.tensor(grad)
    optimizer.step()
print(dispatch.choose("auto", p.device), p.tolist())
"""


@pytest.mark.parametrize("name", ["libfastaccum_core.so", "libfastaccum_mindspore.so"])
def test_core_and_operators_need_neither_torch_nor_python(name):
    library = str(installed(name))
    undefined = output_of("nm", "-DC", "--undefined-only", library)
    assert not re.search(r"torch|at::|c10::|aoti|\bPy_?[A-Z]|omp_", undefined)
    needed = re.findall(r"NEEDED.*\[(.*)\]", output_of("readelf", "-d", library))
    allowed = r"(libstdc\+\+|libgcc_s|libc|libm|libpthread|ld-linux.*)\.so.*|lib[au]\w*san\.so.*"
    allowed += r"|libfastaccum_core\.so" if name != "libfastaccum_core.so" else ""
    assert [name for name in needed if not re.fullmatch(allowed, name)] == []


@pytest.mark.native
@pytest.mark.quick
def test_build_info_tells_how_the_library_was_built():
    installed(f"_C{SUFFIX}")
    import torch  # noqa: F401  (the library's symbols come from it)

    from fastaccum import _C

    info = _C.build_info()
    assert info["torch_target"] == "2.11"
    assert re.match(r"\d+\.\d+\.\d+", info["torch"])
    assert re.match(r"(gcc|clang) \d+", info["compiler"])
    assert "baseline" in info["levels"].split(",")
    assert "-march" not in info["flags"] and "-ffp-contract=off" in info["flags"].split()
