"""docs/: every block runs or is the files' own text, and what the pages name is there.

A Python block runs, in the order of its page. Its title says what else it may be: "before" (a loop of
another library: compiled only), "needs NAME" (runs where that library is installed), "FILE.py on 2 ranks"
(a script for two processes), or a file of the project (an excerpt of it).
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import runpy
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")

import fastaccum  # noqa: E402
from fastaccum import ops  # noqa: E402
from tests.cases import BY_NAME  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"

pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="runs from a checkout")
PAGES = sorted(DOCS.glob("*.md"))
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


class Block(NamedTuple):
    """A fenced block and the number of lines above its text."""

    language: str
    title: str
    above: int
    text: str

    @property
    def needs(self):
        """The library without which it does not run."""
        return self.title.removeprefix("needs ") if self.title.startswith("needs ") else None

    @property
    def script(self):
        """The name of the script that runs on two ranks."""
        return self.title.removesuffix(" on 2 ranks") if self.title.endswith(" on 2 ranks") else None


def blocks_of(page):
    text = page.read_text()
    fence = r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$'
    found = list(re.finditer(fence, text, re.MULTILINE | re.DOTALL))
    assert 2 * len(found) == len(re.findall(r"^```", text, re.MULTILINE)), (
        f"{page.name}: a fence of its own kind"
    )
    return [Block(m[1], m[2] or "", text.count("\n", 0, m.start(3)), m[3]) for m in found]


def compiled(page, block):
    # Lines as in the page, so that a traceback shows them.
    return compile("\n" * block.above + block.text, str(page), "exec")


@pytest.mark.quick
@each_page
def test_every_block_is_of_a_known_kind(page):
    for block in blocks_of(page):
        excerpt = (ROOT / block.title).is_file() if block.title else False
        if block.language == "python":
            known = not block.title or block.title == "before" or block.needs or block.script or excerpt
            assert known, f"{page.name}:{block.above}: {block.title}"
            if not excerpt:
                compiled(page, block)
        else:
            assert block.language == "cpp" and excerpt, f"{page.name}:{block.above}: {block.language}"
        if block.title == "before":
            assert page.name.startswith("migrate-"), "new code runs"


@pytest.fixture
def _as_it_was():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def run(page, libraries=()):
    namespace = {"__name__": page.stem}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module=page.stem)
        for block in blocks_of(page):
            if block.language == "python" and (not block.title or block.needs in libraries):
                exec(compiled(page, block), namespace)


@pytest.mark.quick
@pytest.mark.usefixtures("_as_it_was")
@each_page
def test_blocks_run_in_order(page, capsys):
    run(page)


NEEDED = sorted({(page, block.needs) for page in PAGES for block in blocks_of(page) if block.needs})


@pytest.mark.usefixtures("_as_it_was")
@pytest.mark.parametrize(("page", "library"), NEEDED, ids=lambda value: getattr(value, "stem", value))
def test_blocks_run_with_the_library_that_they_need(page, library, capsys):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    run(page, {library})


# What a loaded machine makes happen, of no fault of the page's. torchrun looks for a free port, and another
# test's may take it before it is used. And after the last line of a script, a process that has used FSDP2
# over gloo may abort: beside three busy loops 8 of 34 runs did, and 7 of 34 of a script without fastaccum.
CHANCES = ("ddress already in use", "terminate called without an active exception")

SCRIPTS = [(page, block) for page in PAGES for block in blocks_of(page) if block.script]


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
@pytest.mark.parametrize(("page", "block"), SCRIPTS, ids=lambda value: getattr(value, "script", ""))
def test_scripts_run_on_two_ranks(page, block, tmp_path):
    script = tmp_path / block.script
    script.write_text("\n" * block.above + block.text)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    for _ in range(3):
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if not any(chance in done.stderr for chance in CHANCES):
            break
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"torchrun --nproc-per-node 2 {SCRIPTS[0][1].script}" in page.read_text()


@pytest.mark.quick
@each_page
def test_excerpts_are_the_files_own_text(page):
    for block in blocks_of(page):
        if block.title and (ROOT / block.title).is_file():
            # But for white space, as the formatter moves an excerpt to the left margin.
            excerpt, text = (" ".join(t.split()) for t in (block.text, (ROOT / block.title).read_text()))
            assert len(excerpt) > 15 and excerpt in text, f"{page.name}: {block.title}: {excerpt}"


# ------------------------------------------------------------------------------------------- names


def slugs_of(page):
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", h).strip().lower()) for h in headings}


@pytest.mark.quick
@each_page
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]+))?\)", page.read_text()):
        path = DOCS / target if target else page
        assert path.is_file(), f"{page.name}: {target}"
        assert not anchor or anchor in slugs_of(path), f"{page.name}: {target}#{anchor}"


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"^ +- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == [page.name for page in PAGES]


@pytest.mark.quick
@each_page
def test_make_has_the_targets(page):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([\w-]+)", page.read_text())) <= targets


@pytest.mark.quick
def test_the_file_map_is_the_folders():
    named = re.findall(r"`([\w./]+[/.][\w/]*)`", (DOCS / "file-map.md").read_text())
    for name in named:
        assert (ROOT / name).exists() or "." in name and name.startswith("fastaccum."), name
    files = [*ROOT.glob("fastaccum/**/*.py"), *ROOT.glob("kernels/*.py")]
    files += [path for path in ROOT.glob("csrc/**/*") if path.is_file()]
    assert len(files) > 50
    lacking = {str(path.relative_to(ROOT)) for path in files} - set(named)
    assert not lacking, f"name them in docs/file-map.md: {sorted(lacking)}"


# ---------------------------------------------------------------------------------------- messages

GAP = "…"


def template(node):
    """A string expression with a gap for each value, or None where it is none."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else GAP for part in node.values]
        return re.sub(f"{GAP}+", GAP, "".join(parts))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = (template(side) or GAP for side in (node.left, node.right))
        return re.sub(f"{GAP}+", GAP, left + right)
    return None


def said(node, named):
    """The template of a message; ``named`` are the module's own strings, which ``format`` may fill."""
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "format":
        node = node.func.value
    return named.get(node.id) if isinstance(node, ast.Name) else template(node)


def strings_in(node):
    """The outermost strings of a tree."""
    found = template(node)
    if found is not None:
        return [found]
    return [text for child in ast.iter_child_nodes(node) for text in strings_in(child)]


# Not for users: what cannot happen, and what only the build's own search of a toolkit says to itself.
INTERNAL = ("AssertionError", "CudaError")
# Calls that say something, or make the error that somebody else raises.
SAY = ("warnings.warn", "logger.warning", "ImportError")


def messages():
    """(place, template) of every message that is raised, warned of, or given as a reason."""
    paths = [*ROOT.glob("fastaccum/*.py"), *ROOT.glob("fastaccum/bridges/*.py")]
    paths += [path for path in ROOT.glob("fastaccum/mindspore/*.py") if path.name != "demo.py"]
    for path in [*sorted(paths), ROOT / "setup.py"]:
        tree = ast.parse(path.read_text())
        named = {
            node.targets[0].id: template(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        for node in ast.walk(tree):
            found = []
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                if ast.unparse(node.exc.func) not in INTERNAL:
                    found = [said(node.exc.args[0], named)]
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in SAY:
                found = [said(node.args[0], named)]
            elif isinstance(node, ast.FunctionDef) and "reasons_against" in node.name:
                given = [part for part in ast.walk(node) if isinstance(part, ast.Return)]
                given += [
                    part.args[0]
                    for part in ast.walk(node)
                    if isinstance(part, ast.Call) and getattr(part.func, "attr", "") == "append"
                ]
                lists = [part for one in given for part in ast.walk(one) if isinstance(part, ast.List)]
                found = [text for part in (*lists, *given) for text in strings_in(part) if " " in text]
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_TEXTS":
                found = [template(value) for value in node.value.values]
            for text in found:
                if text is not None and " " in text:
                    yield f"{path.name}:{node.lineno}", re.sub(r"\{\w+\}", GAP, text)


def entries():
    found = re.findall(r"^- `([^`\n]+)`:", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(found) == len(re.findall(r"^- ", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE))
    return found


def speaks_of(entry, message):
    """Whether an entry is about a message: its parts occur in it in order; a short one is all of it."""
    parts = [part for part in entry.split(GAP) if part]
    if sum(map(len, parts)) < 25:
        return entry.replace("…[…]", GAP) == message.replace("…[…]", GAP)
    return re.search(".*".join(map(re.escape, parts)), message, re.DOTALL) is not None


@pytest.mark.quick
def test_every_message_has_an_entry():
    listed = entries()
    texts = list(messages())
    assert len(texts) > 120
    lacking = [f"{at}: {text}" for at, text in texts if not any(speaks_of(e, text) for e in listed)]
    assert not lacking, "write entries in docs/troubleshooting.md:\n" + "\n".join(lacking)


@pytest.mark.quick
def test_every_entry_is_of_a_message():
    texts = [text for _, text in messages()]
    native = "".join(path.read_text() for path in ROOT.glob("csrc/*.cpp"))
    native = re.sub(r'"\s*\n\s*"', "", native)
    stale = [e for e in entries() if not any(speaks_of(e, text) for text in texts) and e not in native]
    assert not stale, f"no message has these words any more: {stale}"
    assert len(set(entries())) == len(entries())


# ----------------------------------------------------------------------------------------- numbers


@pytest.mark.quick
def test_the_bounds_are_the_tests():
    rows = re.findall(
        r"^\| .*`(tests/\w+\.py)::(\w+)` \| `(.+)` \|$", (DOCS / "numerics.md").read_text(), re.M
    )
    assert len(rows) >= 15
    for file, test, text in rows:
        source = (ROOT / file).read_text()
        assert f"def {test}(" in source, f"{file}::{test}"
        assert text in source, f"{file}: {text}"
    for file, text in re.findall(r"\(`(tests/\w+\.py)`, `([^`]+)`\)", (DOCS / "numerics.md").read_text()):
        assert text in (ROOT / file).read_text(), f"{file}: {text}"
    from tests.test_stock import FLOOR

    assert (
        f"2 × stock's error (mean square and worst) + {FLOOR:.0e}".replace("e-09", "e-9")
        in (DOCS / "numerics.md").read_text()
    )


@pytest.mark.quick
def test_the_numbers_of_each_bound_stand_in_its_test():
    rows = re.findall(
        r"^\| [^|]+ \| [^|]+ \| ([^|]+) \| `[^`]+` \| `([^|]+)` \|$", (DOCS / "numerics.md").read_text(), re.M
    )
    assert len(rows) == 7
    for bound, text in rows:
        numbers = re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?:e-\d+)?(?![\w.])", bound)
        missing = [number for number in numbers if number not in text.replace("floor", "1e-9")]
        assert not missing, f"{bound}: {text}"


@pytest.mark.quick
def test_the_picture_is_its_scripts_and_its_bytes_are_the_ops():
    script = runpy.run_path(str(DOCS / "window_svg.py"))
    assert (DOCS / "window.svg").read_text() == script["draw"](), (
        "python docs/window_svg.py > docs/window.svg"
    )
    f32, bf16 = torch.float32, torch.bfloat16
    gather, adam, sgd = (BY_NAME[name].bytes for name in ("gather_", "adam_", "sgd_"))
    assert script["SECOND"] == gather(1, f32, states="b") and script["SECOND_16"] == gather(
        1, bf16, states="b"
    )
    assert script["LATER"] == gather(1, f32, states="a") and script["LATER_16"] == gather(1, bf16, states="a")
    assert script["ADAMW"] == adam(1, f32) and script["SGD_MOMENTUM"] == sgd(1, f32)
    assert script["CHUNK"] == fastaccum.layout.CHUNK
    assert script["FINISH_PER_CHUNK"] == BY_NAME["finish_"].bytes(1, f32, parameters=0)


# ------------------------------------------------------------------------------------- docstrings


@pytest.mark.quick
@pytest.mark.parametrize(
    "function",
    [getattr(fastaccum, name) for name in fastaccum.__all__ if name not in ("__version__", "ops")]
    + [getattr(ops, name) for name in ops.NAMES],
    ids=lambda f: f.__name__,
)
def test_docstrings_name_every_argument_and_what_is_raised(function):
    text = inspect.getdoc(function)
    if not inspect.signature(function).parameters:
        return
    arguments = re.search(r"^Args:\n(.*?)(?=^\w|\Z)", text, re.MULTILINE | re.DOTALL)[1]
    told = set(re.findall(r"^    (\w+):", arguments, re.MULTILINE))
    assert told == set(inspect.signature(function).parameters)
    assert re.search(r"^Raises:$", text, re.MULTILINE)


@pytest.mark.quick
def test_every_public_member_of_the_wrapper_has_a_docstring_of_its_own():
    for name, member in vars(fastaccum.FusedAccumulator).items():
        if not name.startswith("_") and (callable(member) or isinstance(member, property)):
            assert member.__doc__, name


def methods():
    """(class, name, function) of the public methods of the public classes."""
    kinds = [getattr(fastaccum, name) for name in fastaccum.__all__]
    for kind in [kind for kind in kinds if inspect.isclass(kind)]:
        for name, member in vars(kind).items():
            if not name.startswith("_") and inspect.isfunction(member):
                yield pytest.param(member, id=f"{kind.__name__}.{name}")


@pytest.mark.quick
@pytest.mark.parametrize("method", list(methods()))
def test_docstrings_of_methods_name_every_argument_and_what_they_raise(method):
    text = inspect.getdoc(method)
    listed = re.search(r"^Args:\n(.*?)(?=^\w|\Z)", text, re.MULTILINE | re.DOTALL)
    told = set(re.findall(r"^    \**(\w+):", listed[1], re.MULTILINE)) if listed else set()
    assert told == set(inspect.signature(method).parameters) - {"self"}
    raises = any(isinstance(node, ast.Raise) and node.exc for node in ast.walk(ast.parse(source_of(method))))
    assert not raises or re.search(r"^Raises:$", text, re.MULTILINE)


def source_of(method):
    return textwrap.dedent(inspect.getsource(method))
