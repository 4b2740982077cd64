"""The README's Python runs as it stands, and its tree names files that exist."""

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"

pytestmark = pytest.mark.skipif(not README.is_file(), reason="runs from a checkout")


@pytest.mark.quick
def test_every_python_block_runs_in_order(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) >= 2
    namespace = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)
    printed = capsys.readouterr().out
    assert re.fullmatch(r"norm of the last window \d+\.\d{3}, skipped 0\n", printed)
    # Both ways of weighting the same rows closed a window and applied it.
    assert namespace["optimizer"].stepped
    assert namespace["optimizer"].state[namespace["model"].weight]["step"] == 5
    # The four cares: sizes, rates and fits are those that the text names.
    assert namespace["steps"] == 8 and namespace["cosine"].base_lrs == [pytest.approx(0.1 * 8**0.5)]
    assert namespace["net"][1].num_groups == 2
    assert namespace["plan"].best.fits and namespace["plan"].micro_batch_size < 256
    assert namespace["found"] == (256, 1) and namespace["larger"].updated
    assert namespace["monitor"].peak() > 0


@pytest.mark.quick
def test_the_swap_in_diff_applies_and_both_sides_are_python():
    (diff,) = re.findall(r"```diff\n(.*?)```", README.read_text(), re.DOTALL)
    before = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("+"))
    after = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))
    compile(before, "before", "exec")
    compile(after, "after", "exec")
    assert "optimizer.flush()" in after and "zero_grad" not in after


@pytest.mark.quick
def test_the_tree_names_what_is_there():
    (tree,) = re.findall(r"```\n(setup\.py .*?)```", README.read_text(), re.DOTALL)
    for name in re.findall(r"^(\S+)", tree, re.MULTILINE):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"(\w+\.py) \(", tree):
        assert (ROOT / "fastaccum" / name).exists(), name
