"""Every fault from the field has a test that bears its case's id, and that notices the fault.

tests/wrong_variants.py puts each fault into the library, and the tests of the case must fail then.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.wrong_variants import VARIANTS  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
CASES = """
    N01 N02 N03 N05  C01 C03 C04 C06 C08 C09  D01 D02  L01 L03 L04 L06 L07 L08
    Y01 Y03 Y04 Y05 Y07 Y08  X01 X03 X05  U01 U03 U05 U06 U07  P01 P02  A01 A02 A06
    B01 B02 B04 B05
""".split()


@functools.cache
def named() -> dict[str, set[str]]:
    """``file::function`` -> the ids in its name, of every test in this folder."""
    found = {}
    for path in Path(__file__).parent.glob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                ids = re.match(r"test_((?:[a-z]\d\d_)+)", node.name)
                if ids:
                    found[f"tests/{path.name}::{node.name}"] = set(ids[1].upper().strip("_").split("_"))
    return found


@pytest.mark.quick
def test_every_case_has_a_test_with_its_name_and_a_fault():
    assert len(CASES) == 41
    assert set().union(*named().values()) == set(CASES)
    assert {name.split()[0] for name in VARIANTS} == set(CASES)


@pytest.mark.quick
def test_every_test_of_a_case_is_shown_to_fail():
    shown = {(test, name.split()[0]) for name, variant in VARIANTS.items() for test in variant.tests}
    tests = {test for test, _ in shown}
    assert all(case in named()[test] for test, case in shown)
    assert tests == named().keys()


@functools.cache
def outcomes() -> dict[str, dict[str, str]]:
    """What became of the tests of every variant."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.wrong_variants"],
        cwd=ROOT,
        # What a wrong library reaches proves nothing.
        env={name: value for name, value in os.environ.items() if not name.startswith("COV")},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_the_tests_of_a_case_notice_its_fault(name):
    variant, seen = VARIANTS[name], outcomes()[name]
    assert "error" not in seen, seen["error"]
    for test in variant.tests:
        if seen[test] == "skipped":
            pytest.skip(f"{test} is skipped here")
        assert seen[test] in variant.raises, f"{test}: {seen[test]}"
