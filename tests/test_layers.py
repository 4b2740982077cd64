"""Who may import whom, and what may be included where. Read from the sources."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fastaccum"
pytestmark = [
    pytest.mark.quick,
    pytest.mark.skipif(not PACKAGE.is_dir(), reason="the source tree is not beside the tests"),
]

IMPLEMENTATIONS = {"fastaccum.reference", "fastaccum.kernels", "fastaccum._C"}
# `import fastaccum` must work, quickly, where these are absent.
HEAVY = ("torch", "numpy", "mindspore", "triton", "matplotlib", "sklearn", "rich")


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = ("fastaccum", *parts) if parts[0] == "kernels" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in [*PACKAGE.rglob("*.py"), *ROOT.glob("kernels/*.py")]}


def imports_of(name):
    """Returns the modules that a module imports, anywhere in its text."""
    path = MODULES[name]
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            submodules = {f"{source}.{alias.name}" for alias in node.names}
            known = {m for m in submodules if m in MODULES or m == "fastaccum._C"}
            found.update(known or {source})
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            found.update(a.value.lstrip(".") for a in node.args if isinstance(a, ast.Constant))
    return found


def within(name, prefixes):
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def test_only_dispatch_knows_the_implementations():
    allowed = {"fastaccum.dispatch", "fastaccum.launchers"}
    for name in MODULES.keys() - allowed:
        if within(name, IMPLEMENTATIONS):
            continue
        wrong = {module for module in imports_of(name) if within(module, IMPLEMENTATIONS)}
        assert not wrong, f"{name} imports {wrong}: only fastaccum.dispatch and launchers may"


@pytest.mark.skipif("fastaccum.reference" not in MODULES, reason="no reference backend")
def test_reference_is_plain_torch():
    allowed = (*sys.stdlib_module_names, "torch", "fastaccum.layout")
    assert not {m for m in imports_of("fastaccum.reference") if not within(m, allowed)}


def test_kernels_import_triton_and_torch_only():
    allowed = (*sys.stdlib_module_names, "torch", "triton", "fastaccum.kernels")
    for name in filter(lambda name: within(name, ["fastaccum.kernels"]), MODULES):
        assert not {m for m in imports_of(name) if not within(m, allowed)}, name


def test_nothing_imports_upwards():
    # From the top down; a module may import its neighbours and what stands below it.
    order = [["accumulator"], ["dispatch"], ["gpu"], ["launchers"], ["ops", "tables"], ["layout"]]
    for level, names in enumerate(order):
        above = [f"fastaccum.{upper}" for upper in sum(order[:level], [])]
        for name in {f"fastaccum.{name}" for name in names} & MODULES.keys():
            assert not {m for m in imports_of(name) if within(m, above)}, name


MINDSPORE = sorted(name for name in MODULES if within(name, ["fastaccum.mindspore"]))


def imported_with(name):
    """Every module of fastaccum, and every other name, that importing a module brings with it."""
    seen, open_names = set(), [name]
    while open_names:
        current = open_names.pop()
        if current in seen:
            continue
        seen.add(current)
        if current in MODULES:
            open_names += top_level_imports_of(current)
            open_names += [".".join(current.split(".")[:i]) for i in range(1, current.count(".") + 1)]
    return seen


def top_level_imports_of(name):
    """What a module imports when it is imported: not inside functions, not for type checkers only."""
    body, found = list(ast.parse(MODULES[name].read_text()).body), []
    while body:
        node = body.pop()
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Try):
            body += node.body
        elif isinstance(node, (ast.If, ast.ClassDef)) and "TYPE_CHECKING" not in ast.dump(node):
            body += node.body
    return found


@pytest.mark.parametrize("name", MINDSPORE)
def test_the_mindspore_front_end_never_imports_torch(name):
    heavy = {module for module in imported_with(name) if within(module, ["torch", "triton"])}
    assert not heavy, f"importing {name} imports {heavy}"
    assert not {module for module in imports_of(name) if within(module, ["torch"])}


def test_nothing_else_imports_mindspore():
    for name in MODULES.keys() - set(MINDSPORE):
        found = {m for m in imports_of(name) if within(m, ["mindspore", "fastaccum.mindspore"])}
        assert not found, f"{name} imports {found}"


def test_mindspores_front_end_imports_downwards():
    order = ["train_step", "accumulator", "window_end", "rules", "gradient_sum", "operators", "library"]
    for level, name in enumerate(order):
        above = [f"fastaccum.mindspore.{upper}" for upper in order[:level]]
        found = {m for m in imports_of(f"fastaccum.mindspore.{name}") if within(m, above)}
        assert not found, f"{name} imports {found}"


def test_without_mindspore_the_error_names_the_extra():
    code = "import sys; sys.modules['mindspore'] = None; import fastaccum.mindspore"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode != 0
    assert "needs MindSpore" in result.stderr and "pip install 'fastaccum[mindspore]'" in result.stderr


def includes_of(path):
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE)


SOURCES = [path for path in ROOT.glob("csrc/**/*") if path.suffix in (".h", ".cpp", ".cu")]
FRAMEWORK = r"(torch|ATen|c10|caffe2|aten|pybind11|mindspore)/|Python\.h|omp\.h"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "csrc")))
def test_frameworks_stay_in_the_binding(path):
    # The same sources serve PyTorch and MindSpore, compile alone, and in seconds.
    found = {name for name in includes_of(path) if re.match(FRAMEWORK, name)}
    relative = str(path.relative_to(ROOT / "csrc"))
    if relative in ("binding.cpp", "binding_gpu.cpp"):
        assert not [name for name in found if not name.startswith("torch/")]
        # torch/extension.h costs 24 seconds and ties the build to one version of torch.
        stable = ("torch/csrc/stable/", "torch/headeronly/", "torch/csrc/inductor/aoti_torch/c/")
        assert not [name for name in found if not name.startswith(stable)]
    elif relative == "module.cpp":
        assert not [name for name in found if not name.startswith("pybind11/")]
    else:
        assert not found


def test_one_file_knows_mindspores_calling_convention():
    knowing = {
        path.name for path in SOURCES if re.search(r"\bnparam\b|char\*\*|std::int64_t\*\*", path.read_text())
    }
    assert knowing == {"binding_mindspore.cpp"}


def test_an_op_never_includes_another_op():
    ops = {path.stem for path in SOURCES if path.suffix == ".cu"} | {"adam", "sgd"}
    for path in SOURCES:
        if path.parent.name == "csrc" and path.stem in ops:
            others = {Path(name).stem for name in includes_of(path)} & ops - {path.stem}
            assert not others, f"{path.name} includes {others}: share a third header"


def test_import_is_light():
    code = f"import sys, fastaccum; print([m for m in {HEAVY} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


# Files on the way of step(), flush() and the hooks, and where a host read may stand in them.
ON_THE_WAY = "accumulator arrivals gpu launchers outcome pending roster slots tables updates window".split()
HOST_READS = {
    *(("tables", "host"), ("tables", "bits")),  # numbers that live on the CPU
    ("updates", "before_saving"),  # of state_dict()
}


@pytest.mark.parametrize("name", ON_THE_WAY)
def test_nothing_reads_a_device(name):
    found = set()
    for function in ast.walk(ast.parse((PACKAGE / f"{name}.py").read_text())):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found |= {
                (name, function.name)
                for node in ast.walk(function)
                if isinstance(node, ast.Attribute)
                and node.attr in ("item", "tolist", "numpy", "cpu", "nonzero")
            }
    assert not found - HOST_READS, f"{found - HOST_READS} may make a GPU wait: leave the value on the device"
