"""The README's figures and pictures are those of the committed run."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("torch")

from benchmarks import readme  # noqa: E402
from benchmarks.goals import GOALS  # noqa: E402

pytestmark = pytest.mark.skipif(not readme.README.is_file(), reason="runs from a checkout")


@pytest.fixture
def reports():
    return readme.reports()


@pytest.mark.quick
def test_the_figures_are_those_of_the_run(reports):
    text = readme.README.read_text()
    assert readme.with_figures(text, *reports) == text, "run python -m benchmarks.readme"


@pytest.mark.quick
@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_another_run_gives_other_figures(reports, which):
    text = readme.README.read_text()
    results = reports[which]["results"]
    for result in results["resident"] if which < 3 else results:
        for metrics in result.get("against", {}).values():
            for estimate in metrics.values():
                estimate["value"] *= 1.5
    assert readme.with_figures(text, *reports) != text
    with pytest.raises(ValueError, match="must have one block"):
        readme.with_figures(text.replace("<!-- figures of help", "<!-- "), *reports)


@pytest.mark.quick
def test_the_second_run_is_of_the_same_machine_and_versions(reports):
    first, again = (dict(report["environment"]) for report in reports[:2])
    assert "+" not in again["commit"]
    first.pop("commit"), again.pop("commit")
    assert first == again


@pytest.mark.quick
def test_the_other_run_is_of_the_same_cases_on_another_processor(reports):
    here, other = (reports[which]["environment"] for which in (0, 2))
    assert all(here[fact] == other[fact] for fact in ("torch", "threads", "cores"))
    assert here["cpu"] != other["cpu"] and "+" not in other["commit"]
    cases, others = (
        {result["name"]: result["facts"] for result in reports[which]["results"]["resident"]}
        for which in (0, 2)
    )
    assert {name: facts for name, facts in cases.items() if name.startswith("backward/")} == others


def test_the_pictures_are_of_the_run():
    image = pytest.importorskip("PIL.Image")
    named = set(re.findall(r"\((benchmarks/results/\w+\.png)\)", readme.README.read_text()))
    assert named == {"benchmarks/results/roofline.png", "benchmarks/results/growth.png"}
    for name in named:
        with image.open(readme.ROOT / name) as picture:
            assert picture.text["Source"] == readme.checksum(), f"{name}: run python -m benchmarks.readme"


@pytest.mark.quick
def test_the_run_says_where_it_was_made_and_has_every_goal(reports):
    report = reports[0]
    facts = report["environment"]
    assert {"cpu", "cores", "threads", "torch", "commit", "python", "fastaccum"} <= facts.keys()
    assert "+" not in facts["commit"], "made from a tree with changes that were not committed"
    names = {result["name"] for result in report["results"]["resident"]}
    assert {goal.case for goal in GOALS} <= names
    assert all(result["status"] == "ok" for result in report["results"]["resident"])
