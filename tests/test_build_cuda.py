"""The GPU part of the build: which toolkit is taken, what is said where none is, what is in the library.

Toolkits that cannot be used are scripts here that answer like nvcc; the functions of setup.py that look
for them run in this process.
"""

import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from benchmarks import toolkit
from tests.test_build import (
    NATIVE,
    ROOT,
    SUFFIX,
    TINY_SOURCES,
    installed,
    needs_compiler,
    needs_sources,
    only,
    output_of,
    run_hook,
    tree,  # noqa: F401  (a fixture)
)

needs_nvcc = pytest.mark.skipif(
    toolkit.find("nvcc") is None, reason=f"nvcc is not installed: {toolkit.PACKAGES}"
)
pytestmark = [needs_sources, needs_compiler]

SWITCHES = ("FASTACCUM_CUDA", "FASTACCUM_CUDA_ARCHS", "TORCH_CUDA_ARCH_LIST", "CUDA_HOME", "NVCC_CCBIN")
OPS = ("gather", "norm", "finish", "scale", "adam", "sgd", "store", "upload")

ANSWERS = """#!/bin/sh
case "$*" in
  *--version*) echo "Cuda compilation tools, release {release}, V{release}.88" ;;
  *--list-gpu-code*) printf 'sm_80\\nsm_90\\nsm_100\\nsm_103a\\n' ;;
  *--dryrun*)
    echo '#$ TOP={root}/bin/..'
    echo '#$ INCLUDES="-I{root}/{include}"  '
    echo '#$ LIBRARIES=  "-L{root}/lib/stubs" "-L{root}/lib"' ;;
  *) {compile} ;;
esac
"""


@pytest.fixture
def build(monkeypatch):
    """The functions of setup.py, with a clean environment."""
    for name in (*SWITCHES, "FASTACCUM_SANITIZE", "FASTACCUM_WERROR", "DEBUG", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    return runpy.run_path(str(ROOT / "setup.py"))


@pytest.fixture
def torch_folder(tmp_path):
    """Makes a torch of a given CUDA version."""

    def make(cuda=None):
        folder = tmp_path / f"torch-{cuda}"
        folder.mkdir(exist_ok=True)
        text = f"__version__ = '2.13.0'\ncuda: Optional[str] = {cuda!r}\n"
        (folder / "version.py").write_text(text)
        return folder

    return make


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Makes a toolkit that answers as told, and hides the machine's."""
    bin_folder = tmp_path / "path"
    bin_folder.mkdir()
    (bin_folder / "g++").symlink_to(shutil.which("g++"))
    monkeypatch.setenv("PATH", f"{bin_folder}:/usr/bin:/bin")

    def make(where, release="13.0", compile="exit 0", parts=("include", "lib"), include="include"):
        root = tmp_path / where
        (root / "bin").mkdir(parents=True)
        files = {"include": "include/cuda_runtime.h", "lib": "lib/libcudart_static.a"}
        for part in parts:
            (root / files[part]).parent.mkdir()
            (root / files[part]).touch()
        nvcc = root / "bin/nvcc"
        nvcc.write_text(ANSWERS.format(release=release, root=root, compile=compile, include=include))
        nvcc.chmod(0o755)
        return nvcc

    def hide():  # no toolkit but those that were made
        monkeypatch.setenv("PATH", str(bin_folder))

    make.hide = hide
    make.path = bin_folder
    return make


def test_toolkit_of_cuda_home_comes_first_and_gives_its_own_paths(build, torch_folder, fake, monkeypatch):
    nvcc = fake("tool kit")
    monkeypatch.setenv("CUDA_HOME", str(nvcc.parent.parent))
    found, reason = build["find_toolkit"](torch_folder())
    assert reason == "" and found.nvcc == str(nvcc) and found.version == "13.0.88"
    assert found.include == str(nvcc.parent.parent / "include")
    assert found.cudart == str(nvcc.parent.parent / "lib/libcudart_static.a")
    assert found.archs == "8.0;9.0;10.0+PTX"
    assert list(found.targets) == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_100,code=sm_100",
        "-gencode=arch=compute_100,code=compute_100",
    ]


def test_nvcc_on_path_may_be_a_script_somewhere_else(build, torch_folder, fake):
    nvcc = fake("elsewhere")
    wrapper = fake.path / "nvcc"
    wrapper.write_text(f'#!/bin/sh\nexec {nvcc} "$@"\n')
    wrapper.chmod(0o755)
    found, _ = build["find_toolkit"](torch_folder())
    assert found.nvcc == str(wrapper) and found.include == str(nvcc.parent.parent / "include")


def test_package_toolkit_serves_where_path_has_none_or_one_that_is_too_old(
    build, torch_folder, fake, monkeypatch, tmp_path
):
    nvcc = fake("site-packages/nvidia/cu13")
    fake.hide()
    # The script needs its interpreter and programs by their full names.
    nvcc.write_text(nvcc.read_text().replace("printf", "/usr/bin/printf"))
    monkeypatch.setattr("sys.path", [str(tmp_path / "site-packages")])
    assert build["find_toolkit"](torch_folder())[0].nvcc == str(nvcc)
    old = fake("old", release="11.8")
    (fake.path / "nvcc").symlink_to(old)
    assert build["find_toolkit"](torch_folder("13.0"))[0].nvcc == str(nvcc)


PROBLEMS = [
    ({"release": "12.4"}, {}, None, r"it is CUDA 12[.]4[.]88, CUDA >= 12[.]8 is needed"),
    ({"release": "14.1"}, {}, "13.0", r"it is CUDA 14[.]1[.]88, torch was built with CUDA 13[.]0"),
    ({"parts": ("include",)}, {}, None, r"it comes without libcudart_static[.]a \(searched .*/lib"),
    ({"parts": ("lib",)}, {}, None, r"it comes without cuda_runtime[.]h"),
    ({"compile": "echo unsupported GNU version; exit 1"}, {}, None, "fails .*unsupported GNU version"),
    ({}, {"TORCH_CUDA_ARCH_LIST": "7.0 7.5"}, None, "TORCH_CUDA_ARCH_LIST='7.0 7.5' holds nothing from 8.0"),
    ({}, {"TORCH_CUDA_ARCH_LIST": "Hopper"}, None, "'Hopper' is not of the form 9.0 or 9.0[+]PTX"),
    ({}, {"TORCH_CUDA_ARCH_LIST": "12.0"}, None, "it does not know the GPU 12[.]0"),
    ({"release": "nonsense"}, {}, None, "it does not tell its version"),
]


@pytest.mark.parametrize(("kind", "switches", "cuda", "reason"), PROBLEMS)
def test_b01_unusable_toolkit_is_left_out_with_its_reason(
    build, torch_folder, fake, monkeypatch, capsys, kind, switches, cuda, reason
):
    nvcc = fake("toolkit", **kind)
    torch = torch_folder(cuda)
    for name, value in {"CUDA_HOME": str(nvcc.parent.parent), **switches}.items():
        monkeypatch.setenv(name, value)
    found, why = build["find_toolkit"](torch)
    assert found is None and re.search(reason, why) and str(nvcc) in why
    assert f"WITHOUT GPU kernels: {why}" in capsys.readouterr().out
    monkeypatch.setenv("FASTACCUM_CUDA", "1")
    with pytest.raises(build["BuildError"], match=reason):
        build["find_toolkit"](torch)


def test_toolkit_that_was_never_tried_must_be_asked_for(build, torch_folder, fake, monkeypatch):
    nvcc = fake("toolkit", release="12.9")
    monkeypatch.setenv("CUDA_HOME", str(nvcc.parent.parent))
    found, why = build["find_toolkit"](torch_folder())
    assert found is None and "CUDA 12.9.88, which has not been tried: FASTACCUM_CUDA=1 builds with it" in why
    monkeypatch.setenv("FASTACCUM_CUDA", "1")
    assert build["find_toolkit"](torch_folder())[0].version == "12.9.88"


@pytest.mark.parametrize("home", ["/nonexistent", None])
def test_b01_missing_toolkit_is_said(build, torch_folder, fake, monkeypatch, home):
    fake.hide()
    monkeypatch.setattr("sys.path", [])
    build["package_folders"].__globals__["package_folders"] = lambda: []
    if home:
        monkeypatch.setenv("CUDA_HOME", home)
    found, why = build["find_toolkit"](torch_folder())
    assert found is None
    assert ("/nonexistent/bin/nvcc: it does not run" in why) if home else ("no CUDA toolkit was found" in why)


@pytest.mark.parametrize(
    ("words", "targets"),
    [
        ("9.0", ["compute_90,code=sm_90"]),
        ("9.0+PTX", ["compute_90,code=sm_90", "compute_90,code=compute_90"]),
        ("10.3a;8.0", ["compute_80,code=sm_80", "compute_103a,code=sm_103a"]),
        ("8.0, 9.0,9.0 ;", ["compute_80,code=sm_80", "compute_90,code=sm_90"]),
    ],
)
def test_architectures(build, torch_folder, fake, monkeypatch, words, targets):
    nvcc = fake("toolkit")
    monkeypatch.setenv("CUDA_HOME", str(nvcc.parent.parent))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "nonsense")
    monkeypatch.setenv("FASTACCUM_CUDA_ARCHS", words)
    found, _ = build["find_toolkit"](torch_folder())
    assert list(found.targets) == [f"-gencode=arch={target}" for target in targets]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("FASTACCUM_CUDA_ARCHS", "sm_90", "FASTACCUM_CUDA_ARCHS='sm_90': 'sm_90' is not of the form 9.0"),
        ("FASTACCUM_CUDA_ARCHS", " ; ", "is not of the form"),
        ("FASTACCUM_CUDA_ARCHS", "7.5;9.0", "GPUs older than 8.0 are not supported"),
        ("FASTACCUM_CUDA", "yes", "FASTACCUM_CUDA must be auto, 0 or 1, not 'yes'"),
    ],
)
def test_own_switches_are_strict(build, torch_folder, fake, monkeypatch, name, value, words):
    nvcc = fake("toolkit")
    monkeypatch.setenv("CUDA_HOME", str(nvcc.parent.parent))
    monkeypatch.setenv(name, value)
    with pytest.raises(build["BuildError"], match=re.escape(words)):
        build["find_toolkit"](torch_folder())


def test_switch_leaves_the_kernels_out(build, torch_folder, fake, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(fake("toolkit").parent.parent))
    monkeypatch.setenv("FASTACCUM_CUDA", "0")
    assert build["find_toolkit"](torch_folder()) == (None, "built with FASTACCUM_CUDA=0")
    monkeypatch.setenv("FASTACCUM_CUDA", "1")
    monkeypatch.setenv("FASTACCUM_SANITIZE", "address")
    assert build["find_toolkit"](torch_folder())[1] == "sanitizer builds leave the GPU kernels out"


def test_debug_build_checks_its_tables(build, monkeypatch):
    assert "-O3" in build["nvcc_flags"]() and "-DFASTACCUM_DEBUG" not in build["nvcc_flags"]()
    monkeypatch.setenv("DEBUG", "1")
    assert "-DFASTACCUM_DEBUG" in build["nvcc_flags"]() and "-O3" not in build["nvcc_flags"]()
    assert "-DFASTACCUM_DEBUG" in build["compile_flags"]()
    assert "-fmad=false" in build["nvcc_flags"]()


TINY_GPU = {
    "tiny.h": "const char* tiny_launch(void* stream);\n",
    "tiny.cu": """
        #include <cuda_runtime.h>
        #include "tiny.h"
        __global__ void tiny(int* p) { if (p) *p = 1; }
        const char* tiny_launch(void* stream) {
          tiny<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(nullptr);
          return cudaGetErrorString(cudaGetLastError());
        }
    """,
    "other.cu": "__global__ void other() {}\n",
    "binding_gpu.cpp": """
        #include <torch/csrc/stable/version.h>
        #include <cuda_runtime.h>
        #include "tiny.h"
        const char* anchor_gpu() { return tiny_launch(nullptr); }
        #if !defined(FASTACCUM_WITH_CUDA)
        #error "not told that there is CUDA"
        #endif
    """,
    "module.cpp": TINY_SOURCES["module.cpp"]
    + """
        extern "C" __attribute__((visibility("default"))) const char* cuda_facts() {
          return FASTACCUM_CUDA "|" FASTACCUM_CUDA_ARCHS "|" FASTACCUM_CUDA_NOTE;
        }
        const char* anchor_gpu();
    """,
}


@pytest.fixture
def gpu_tree(tree):  # noqa: F811
    """A copy of the source tree with small native sources, for the GPU too."""
    for source in (tree / "csrc").glob("*.cu"):
        source.unlink()
    for name, text in TINY_GPU.items():
        (tree / "csrc" / name).write_text(text)
    return tree


@needs_nvcc
def test_one_library_holds_all_architectures_and_needs_no_cuda(gpu_tree, tmp_path):
    nvcc = toolkit.need("nvcc")
    path = {"PATH": f"{Path(nvcc).parent}:{os.environ['PATH']}", "FASTACCUM_CUDA": "1"}
    result = run_hook("build_wheel", gpu_tree, tmp_path / "out", **path)
    assert result.returncode == 0, result.stdout
    assert re.search(r"native build took \d+[.]\d s", result.stdout)
    with zipfile.ZipFile(only(tmp_path / "out", "*.whl")) as archive:
        assert {name for name in archive.namelist() if ".so" in name} == NATIVE
        library = Path(archive.extract(f"fastaccum/_C{SUFFIX}", tmp_path))
    assert f"{toolkit.version()}|8.0;9.0;10.0+PTX|".encode() in library.read_bytes()
    needed = re.findall(r"NEEDED.*\[(.*)\]", output_of("readelf", "-d", str(library)))
    assert not [name for name in needed if re.search("libcu|libnv", name)]
    # The run-time library is inside, and its functions are nobody else's business.
    defined = output_of("nm", "-D", "--defined-only", str(library))
    undefined = output_of("nm", "-D", "--undefined-only", str(library))
    assert not re.search(r" _*cuda[A-Z]\w*", defined + undefined)
    assert re.search(r" cudaGetLastError", output_of("nm", str(library)))
    if toolkit.find("cuobjdump"):
        listed = output_of(toolkit.need("cuobjdump"), "--list-elf", "--list-ptx", str(library))
        assert set(re.findall(r"sm_\d+[.](?:cubin|ptx)", listed)) == {
            *("sm_80.cubin", "sm_90.cubin", "sm_100.cubin", "sm_100.ptx")
        }

    # What has changed is compiled again, and nothing else.
    def compiled():
        return {path.name: path.stat().st_mtime_ns for path in gpu_tree.glob("build/native-*/**/*.o")}

    before = compiled()
    (gpu_tree / "csrc/tiny.h").write_text(TINY_GPU["tiny.h"] + "// changed\n")
    assert run_hook("build_wheel", gpu_tree, tmp_path / "again", **path).returncode == 0
    changed = {name for name, time in compiled().items() if before[name] != time}
    assert changed == {"tiny.o", "binding_gpu.o"}
    before = compiled()
    result = run_hook("build_wheel", gpu_tree, tmp_path / "less", FASTACCUM_CUDA_ARCHS="9.0", **path)
    assert result.returncode == 0, result.stdout
    changed = {name for name, time in compiled().items() if before[name] != time}
    assert changed == {"tiny.o", "other.o", "module.o"}  # the module tells the architectures


def test_b01_library_without_kernels_tells_why(gpu_tree, tmp_path):
    (gpu_tree / "csrc/module.cpp").write_text(TINY_GPU["module.cpp"].replace("const char* anchor_gpu();", ""))
    result = run_hook("build_wheel", gpu_tree, tmp_path / "out", CUDA_HOME='/nonexistent "quoted"')
    assert result.returncode == 0, result.stdout
    reason = '/nonexistent "quoted"/bin/nvcc: it does not run'
    assert f"WITHOUT GPU kernels: {reason}" in result.stdout
    with zipfile.ZipFile(only(tmp_path / "out", "*.whl")) as archive:
        assert f"||{reason}".encode() in archive.read(f"fastaccum/_C{SUFFIX}")
    result = run_hook("build_wheel", gpu_tree, tmp_path / "no", CUDA_HOME="/nonexistent", FASTACCUM_CUDA="1")
    assert result.returncode != 0 and "FASTACCUM_CUDA=1, but /nonexistent/bin/nvcc" in result.stdout


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "csrc").glob("*.cu")))
def test_each_file_compiles_alone(tmp_path, name):
    # With no flag but the standard: others look at the kernels one file at a time. For the other
    # architectures, with -fmad=false, tests/test_static_proof.py compiles them just so.
    cubin = tmp_path / "out.cubin"
    command = [toolkit.need("nvcc"), "-std=c++20", "-arch=sm_80", "-cubin", "-o", str(cubin)]
    done = subprocess.run([*command, str(ROOT / "csrc" / name)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.args}: {done.stderr}"
    assert cubin.stat().st_size > 0


# The library that is installed here.


def built_with_cuda():
    installed(f"_C{SUFFIX}")
    import torch  # noqa: F401  (the library's symbols come from it)

    from fastaccum import _C

    info = _C.build_info()
    if not info["cuda"]:
        pytest.skip(f"built without GPU kernels: {info['cuda_note']}")
    return info


def test_build_info_tells_the_toolkit():
    info = built_with_cuda()
    assert re.fullmatch(r"\d+[.]\d+[.]\d+", info["cuda"]) and info["cuda_note"] == ""
    assert re.fullmatch(r"(\d+[.]\d[af]?([+]PTX)?;?)+", info["cuda_archs"])


@pytest.mark.parametrize("op", OPS)
def test_op_is_registered_for_cuda(op):
    built_with_cuda()
    import torch

    import fastaccum  # noqa: F401

    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fastaccum::launch_{op}", "CUDA")


def test_installed_library_needs_neither_gpu_nor_cuda():
    built_with_cuda()
    library = str(installed(f"_C{SUFFIX}"))
    needed = re.findall(r"NEEDED.*\[(.*)\]", output_of("readelf", "-d", library))
    assert not [name for name in needed if re.search("libcu|libnv", name)]
    strong = output_of("nm", "-D", "--undefined-only", library)
    assert re.findall(r" U (_*cuda[A-Z]\w*|\w*get_current_cuda_stream)", strong) == []
    assert importlib.util.find_spec("fastaccum") is not None
