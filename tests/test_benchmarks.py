"""The benchmarks cannot rot: every body runs once, small; their statistics are right."""

import gc
import json
import math
import os
import random
import stat

import pytest

torch = pytest.importorskip("torch")

from benchmarks import (  # noqa: E402
    __main__,
    agreement,
    bench_backward,
    bench_clip,
    bench_memory,
    bench_microbatch,
    bench_ops,
    bench_training,
    bench_windows,
    goals,
    harness,
    models,
    plots,
    providers,
    shapes,
    stats,
    table,
)
from benchmarks.case import Case, Prepared  # noqa: E402
from benchmarks.roofline import ELEMENTS, LOOPS, Roofline  # noqa: E402
from benchmarks.roofline import TINY as TINY_ROOF  # noqa: E402

TINY = shapes.named("tiny")


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny work on two threads that fight for one free core takes minutes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- statistics --------------------------------------------------------------------------------


def test_iqr_is_inclusive():
    assert stats.iqr([5.0, 1.0, 2.0, 4.0, 3.0]) == 2.0
    assert stats.iqr([7.0]) == 0.0


def test_spread_of_median_estimates_its_standard_error():
    rng = random.Random(0)
    medians, spreads = [], []
    for _ in range(300):
        samples = [rng.gauss(10.0, 1.0) for _ in range(101)]
        medians.append(sorted(samples)[50])
        spreads.append(stats.spread_of_median(samples))
    mean = sum(medians) / len(medians)
    error = math.sqrt(sum((m - mean) ** 2 for m in medians) / len(medians))
    assert sum(spreads) / len(spreads) == pytest.approx(error, rel=0.15)


def test_ratio_cancels_what_both_saw():
    weather = [1.0, 3.0, 1.2, 9.0, 1.1, 2.0, 5.0]
    estimate = stats.ratio([2.0 * w for w in weather], weather)
    assert estimate.value == pytest.approx(2.0)
    assert estimate.spread == pytest.approx(0.0, abs=1e-12)
    assert stats.speed_words(estimate) == "faster"


def test_ratio_wants_samples_of_the_same_rounds():
    with pytest.raises(ValueError, match="paired by round, got 2 and 1"):
        stats.ratio([1.0, 2.0], [1.0])


@pytest.mark.parametrize(
    ("value", "spread", "side"),
    [(1.5, 0.1, 1), (1.5, 0.11, 0), (0.5, 0.1, -1), (1.0, 0.0, 1), (1.5, math.inf, 0),
     (math.nan, 0.1, 0)],
)  # fmt: skip
def test_a_difference_below_five_spreads_is_none(value, spread, side):
    assert stats.Estimate(value, spread).against(1.0) == side


def test_two_samples_tell_nothing():
    assert stats.speed_words(stats.ratio([9.0, 9.0], [1.0, 1.0])) == stats.CANNOT_TELL


# --- harness -----------------------------------------------------------------------------------


def test_interleave_turns_the_order_and_drops_the_first_round():
    order = []

    def sampler(name):
        def sample():
            order.append(name)
            assert not gc.isenabled()
            return {"t": float(len(order))}

        return sample

    found = harness.interleave({name: sampler(name) for name in "abc"}, rounds=3)
    assert "".join(order) == "abc" + "bca" + "cab" + "abc"
    assert found["a"]["t"] == [6.0, 8.0, 10.0]
    assert gc.isenabled()


def test_interleave_gives_the_collector_back_when_a_provider_raises():
    def broken():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        harness.interleave({"a": broken}, rounds=1)
    assert gc.isenabled()


def test_record_gives_ratios_and_the_share_of_the_triad():
    ours, roof = [0.5] * 5, [1.0] * 5
    samples = {
        "fastaccum": {"t": ours},
        "stock": {"t": [1.0] * 5},
        harness.ROOF: {name: roof for name in LOOPS} | {"triad": [3.0] * 5},
    }
    prepared = Prepared({}, bytes={"fastaccum": {"t": 3 * ELEMENTS}}, missing={"peer": "absent"})
    record = harness.record(Case("c", lambda: prepared), prepared, samples)
    assert record["against"]["stock"]["t"] == {"value": 2.0, "spread": 0.0, "verdict": "faster"}
    assert record["over"]["stock"]["t"] == {"value": 0.5, "spread": 0.0}
    # 3 bytes in half a second, where the in-place triad moves 12 in one.
    assert record["share"]["fastaccum"]["t"]["value"] == pytest.approx(0.5)
    assert record["missing"] == {"peer": "absent"}
    assert any("skipped: absent" in cell for row in table.case_rows(record) for cell in row)


def test_a_case_that_does_not_fit_is_skipped_with_the_reason():
    case = Case("huge", pytest.fail, memory=1 << 60)
    record = harness.run_case(case, rounds=1)
    assert record["status"] == "skipped"
    assert "GiB of memory" in record["reason"]


def test_a_case_that_nobody_can_run_names_the_reasons():
    case = Case("none", lambda: Prepared({}, missing={"peer": "not installed"}))
    record = harness.run_case(case, rounds=1)
    assert (record["status"], record["reason"]) == ("skipped", "peer: not installed")


@pytest.mark.skipif(os.name != "posix", reason="the dying child is a shell script")
def test_a_child_that_dies_costs_one_case(tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text(
        """#!/bin/sh
for name in $(cat); do
  echo '{"event": "start", "name": "'$name'", "rounds": 1}'
  test $name = killer && kill -9 $$
  echo '{"event": "result", "result": {"name": "'$name'", "status": "ok"}}'
done
"""
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(harness.sys, "executable", str(script))
    events = list(harness.run_children(["a", "killer", "b"], "default", []))
    results = [e["result"] for e in events if e["event"] == "result"]
    assert [(r["name"], r["status"]) for r in results] == [
        ("a", "ok"),
        ("killer", "failed"),
        ("b", "ok"),
    ]
    assert "-9" in results[1]["reason"]


@pytest.mark.skipif(os.name != "posix", reason="the child is a shell script")
def test_a_case_that_does_not_fit_beside_what_a_child_keeps_gets_a_new_child(tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text(
        """#!/bin/sh
set -- $(cat)
if test $1 = first; then
  echo '{"event": "start", "name": "first", "rounds": 1}'
  echo '{"event": "result", "result": {"name": "first", "status": "ok"}}'
  echo '{"event": "again"}'
else
  echo '{"event": "start", "name": "'$1'", "rounds": 1}'
  echo '{"event": "result", "result": {"name": "'$1'", "status": "ok", "pid": '$$'}}'
fi
"""
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(harness.sys, "executable", str(script))
    events = harness.run_children(["first", "large"], "default", [])
    assert [e["result"]["name"] for e in events if e["event"] == "result"] == ["first", "large"]


def test_a_child_runs_a_case_that_does_not_fit_only_as_its_first(monkeypatch, capsys):
    free = iter([2 << 30, 0])
    monkeypatch.setattr(harness, "available_memory", lambda: next(free))
    monkeypatch.setattr(harness, "environment", lambda threads: {})
    made = Prepared({}, missing={"peer": "not installed"})
    assert harness.child([Case("first", lambda: made), Case("large", pytest.fail)], True, 1) == 0
    events = [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()]
    assert events == ["environment", "start", "result", "again"]


# --- shapes and models -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tensors", "elements"),
    [("gpt2-124m", 148, 124_439_808), ("resnet50", 161, 25_557_032), ("2000x512", 2000, 1_024_000)],
)
def test_shapes_are_those_of_the_real_models(name, tensors, elements):
    found = shapes.named(name)
    assert (len(found), shapes.numel(found)) == (tensors, elements)


def test_unknown_shapes_are_named():
    with pytest.raises(KeyError, match="no shapes called 'gpt5'; there are gpt2-124m"):
        shapes.named("gpt5")


def test_resnet50_has_the_listed_shapes():
    with torch.device("meta"):
        model = models.resnet50()
    assert [tuple(p.shape) for p in model.parameters()] == shapes.resnet50()


# --- every body once ---------------------------------------------------------------------------


def run_once(prepared: Prepared) -> dict:
    """Samples every provider in one round and checks what was recorded."""
    assert prepared.samplers or prepared.sections
    samples = harness.interleave(prepared.samplers, rounds=1)
    for metrics in samples.values():
        assert all(seconds >= 0.0 for found in metrics.values() for seconds in found)
    record = harness.record(Case("once", lambda: prepared), prepared, samples)
    json.dumps(record)
    table.case_rows(record)
    return record


def ours(prepared: Prepared) -> None:
    """fastaccum itself may never be what is missing, except where it has no native library."""
    for name, reason in prepared.missing.items():
        assert not name.startswith("fastaccum") or "native" in reason, f"{name}: {reason}"


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_windows_agree_and_run(steps):
    names = ["fastaccum", "fastaccum reference", "stock best", "stock loop"]
    prepared = bench_windows.prepare(TINY, steps, names)
    ours(prepared)
    run_once(prepared)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("update", providers.UPDATES)
def test_windows_of_every_update_agree_and_run(update, dtype):
    prepared = bench_windows.prepare(TINY, 3, ["fastaccum", "stock best"], update, dtype)
    ours(prepared)
    record = run_once(prepared)
    assert record["facts"]["update"] == update and record["facts"]["dtype"] == str(dtype)


@pytest.mark.parametrize("name", ["docstrings_task", "digits_task"])
def test_trainings_agree_run_and_tell_their_peak(name):
    pytest.importorskip("sklearn")
    prepared = bench_training.prepare(name, 2)
    ours(prepared)
    record = run_once(prepared)
    peaks = {who: peak["bytes"]["bytes"] for who, peak in record["peak"].items()}
    # One more set of gradients, kept, and the buffer.
    assert peaks["stock loop"] <= peaks["fastaccum take=backward"] < peaks["fastaccum"]
    (row, *_) = table.case_rows(record)
    assert row[-2].endswith("/s")


def test_a_training_that_ends_elsewhere_is_found(monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.setattr(bench_training.Best, "options", {"fused": True, "weight_decay": 30.0})
    with pytest.raises(AssertionError, match="the loss after two windows: stock best"):
        bench_training.prepare("digits_task", 2)


def test_peers_run_or_say_why_not():
    prepared = bench_windows.prepare(TINY, 2, list(providers.WINDOW_PROVIDERS))
    assert set(prepared.samplers) | set(prepared.missing) == set(providers.WINDOW_PROVIDERS)
    for name in ("apex", "transformer engine"):
        assert prepared.missing[name] == "runs on a GPU only: make gpu-check times it there"


def test_a_wrong_result_is_found_before_anything_is_timed(monkeypatch):
    class Wrong(providers.StockBest):
        def close(self, index):
            self.params[3].grad.mul_(1.001)
            super().close(index)

    monkeypatch.setitem(providers.WINDOW_PROVIDERS, "wrong", Wrong)
    with pytest.raises(AssertionError, match="wrong / stock best"):
        bench_windows.prepare(TINY, 1, ["stock best", "wrong"])


@pytest.mark.parametrize("steps", [1, 3])
def test_windows_with_a_real_backward_agree_and_run(steps):
    prepared = bench_backward.prepare(TINY, steps, list(bench_backward.PROVIDERS))
    assert set(prepared.samplers) == set(bench_backward.PROVIDERS) and not prepared.missing
    for sampler in prepared.samplers.values():
        seconds = sampler()
        assert (
            0.0 < seconds["window end"] <= seconds["window"] and seconds["accumulation"] < seconds["window"]
        )


def test_a_real_backward_brings_what_each_provider_is_compared_by(monkeypatch):
    """Stock's gradients are divided by K before they are added; where they are not, nothing is timed."""
    monkeypatch.setattr(providers.StockBest, "averages", True)
    with pytest.raises(AssertionError, match="norm: stock best"):
        bench_backward.prepare(TINY, 2, ["fastaccum", "stock best"])


def test_as_many_7b_layers_as_the_memory_holds(monkeypatch):
    for total, layers in ((1 << 30, 1), (16 << 30, 1), (64 << 30, 4), (1 << 62, 32)):
        monkeypatch.setattr(harness, "total_memory", lambda total=total: total)
        assert bench_windows.layers_that_fit(2) == layers


def test_window_bytes_are_those_of_the_design():
    assert bench_windows.window_bytes("fastaccum", 1, 1) == {"window": 32, "window end": 32}
    assert bench_windows.window_bytes("fastaccum", 4, 1) == {"window": 64, "window end": 40}
    assert bench_windows.window_bytes("stock best", 4, 1) == {"window": 76, "window end": 52}
    # bf16: parameter and moments 2 bytes each, the buffer 4.
    assert bench_windows.window_bytes("fastaccum", 3, 1, "SGD", 2) == {"window": 30, "window end": 22}
    assert bench_windows.window_bytes("stock best", 3, 1, "SGD", 2) == {"window": 28, "window end": 22}


@pytest.mark.parametrize("clips", [True, False])
def test_clip_agrees_and_runs(clips):
    prepared = bench_clip.prepare(TINY, clips)
    ours(prepared)
    run_once(prepared)


def test_clip_keeps_its_gradients_in_range():
    clip = bench_clip.Clip(torch.nn.utils.clip_grad_norm_, TINY, clips=True)
    for _ in range(50):
        clip.sample()
    norm = torch.nn.utils.get_total_norm([p.grad for p in clip.params])
    assert 1e-7 * clip.norm < norm < 2 * clip.norm


@pytest.mark.parametrize(
    "task",
    [
        lambda: bench_microbatch.gpt(batch=2, length=8),
        lambda: bench_microbatch.resnet50(batch=2, size=32, width=4),
        lambda: bench_microbatch.bare(count=5, size=7),
    ],
    ids=["gpt", "resnet50", "bare"],
)
def test_micro_batches_agree_and_run(task):
    prepared = bench_microbatch.prepare(task)
    ours(prepared)
    run_once(prepared)


def test_bare_backward_hands_its_gradients_over_uncopied():
    params = [torch.zeros(3, requires_grad=True)]
    models.Bare.apply([torch.ones(3)], *params).backward()
    first = params[0].grad
    assert first.untyped_storage().nbytes() == 12
    assert torch.equal(first, torch.ones(3))


@pytest.mark.parametrize("mode", ["K=1", "step", "backward"])
def test_memory_runs(mode):
    prepared = bench_memory.prepare(mode, TINY)
    ours(prepared)
    if prepared.sections:
        run_once(prepared)


def test_peak_bytes_sees_what_lives_inside_an_op():
    def run():
        kept = torch.empty(1000, dtype=torch.uint8)
        (kept.float() + 1.0).sum()  # 4000 and 4000 more at once, both gone afterwards

    assert 9000 <= bench_memory.peak_bytes(run) <= 9200


def test_stock_peak_is_one_set_and_the_gradient_in_flight():
    sizes = [(1000,), (3000,), (2000,)]
    expected = 4 * (6000 + 3000)
    assert bench_memory.measure_stock(sizes) == pytest.approx(expected, rel=0.02)


OP_PROVIDERS = {**bench_ops.PROVIDERS, "fastaccum reference": bench_ops.Reference}


@pytest.mark.parametrize("case", bench_ops.cases(TINY, OP_PROVIDERS), ids=lambda case: case.name)
def test_ops_agree_and_run(case):
    prepared = case.prepare()
    ours(prepared)
    run_once(prepared)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ops_are_credited_with_the_bytes_of_the_table_of_ops(dtype):
    e = dtype.itemsize
    expected = {
        "gather first": e + 4, "gather second": 2 * e + 4, "gather later": e + 8, "gather last": e + 8,
        "norm": e, "scale": 2 * e, "sgd": 5 * e, "adam": 7 * e, "adamw": 7 * e,
    }  # fmt: skip
    assert {name: bench_ops.moved(name, 1000, dtype) for name in bench_ops.TIMED} == {
        name: 1000 * per for name, per in expected.items()
    }
    label = {torch.float32: "float32", torch.bfloat16: "bf16"}[dtype]
    for case in bench_ops.cases(TINY):
        if case.name.endswith(f"/{label}"):
            name = case.name.split("/")[1].replace("-", " ")
            moved = {name: expected[name] * shapes.numel(TINY)}
            assert all(bytes_ == moved for bytes_ in case.prepare().bytes.values())


def test_roofline_loops_run_and_stay_finite():
    roof = Roofline(TINY_ROOF)
    for _ in range(3):
        assert set(roof.sample()) == set(LOOPS) == set(roof.bytes())
    assert all(t.isfinite().all() for t in (roof.a, roof.b, roof.c))
    assert roof.bytes()["triad"] == 12 * TINY_ROOF


def test_plots_are_written(tmp_path):
    pytest.importorskip("matplotlib")
    results = []
    for count in (1, 10):
        share = {"bytes": 100 * count, "GB/s": 1.0, "value": 0.5, "spread": 0.0}
        results.append({
            "name": f"window/tensors-{count}/K=1", "status": "ok",
            "facts": {"tensors": count, "elements": 512},
            "providers": {"fastaccum": {"window": {"median": 1e-6 * count}}},
            "share": {"fastaccum": {"window": share}}, "roofline": {"triad": 10.0},
        })  # fmt: skip
    line = plots.write({"results": {harness.RESIDENT: results}}, tmp_path / "new")
    assert "roofline.png" in line
    assert {p.name for p in (tmp_path / "new").iterdir()} == {"roofline.png", "growth.png"}
    assert plots.write({"results": {harness.RESIDENT: []}}, tmp_path) == "no plots"


# --- goals and command line --------------------------------------------------------------------


def test_every_goal_names_a_case_that_exists():
    names = {case.name for case in __main__.all_cases()}
    assert len(names) == len(__main__.all_cases()), "case names are unique"
    assert {goal.case for goal in goals.GOALS} <= names


def test_verdicts():
    goal = goals.Goal("w", "c", "against", "stock", "t", 1.4)
    least = goals.Goal("w", "c", "over", "stock", "t", 1.02, at_most=True)
    assert goal.verdict(stats.Estimate(1.7, 0.01)) == "met"
    assert goal.verdict(stats.Estimate(1.2, 0.01)) == "missed"
    assert goal.verdict(stats.Estimate(1.41, 0.01)) == "cannot tell"
    assert goal.verdict(goal.measured({})) == "not measured"
    assert least.verdict(stats.Estimate(1.0, 0.001)) == "met"
    assert least.verdict(stats.Estimate(1.2, 0.001)) == "missed"


def test_unknown_case_names_are_rows_of_the_table():
    chosen, rows = __main__.select(__main__.all_cases(), ["window/tiny", "bogus"], quick=True)
    assert [case.name for case in chosen] == ["window/tiny/K=2"]
    assert [(row["name"], row["status"]) for row in rows] == [("bogus", "skipped")]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "is not what --json"),
        ("{}", "is not what --json"),
    ],
)
def test_a_report_that_is_none_is_refused_before_anything_runs(tmp_path, monkeypatch, text, says):
    monkeypatch.setattr(harness, "run_children", pytest.fail)
    path = tmp_path / "report.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit, match=f"--compare: .*{says}"):
        __main__.main(["--quick", "--compare", str(path)])


def test_a_folder_that_is_not_there_is_named_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "run_children", pytest.fail)
    with pytest.raises(SystemExit, match="there is no folder"):
        __main__.main(["--quick", "--json", str(tmp_path / "nowhere" / "report.json")])


@pytest.mark.parametrize("number", ["0", "-1", "x"])
def test_a_wrong_number_of_threads_is_refused(number, capsys):
    with pytest.raises(SystemExit):
        __main__.main(["--quick", "--threads", number])
    assert "--threads" in capsys.readouterr().err


def test_an_interrupted_run_keeps_and_shows_what_it_has(tmp_path, monkeypatch, capsys):
    def children(*_):
        yield {"event": "environment", "facts": {"cpu": "x", "commit": "a"}}
        yield {"event": "start", "name": "one", "rounds": 1}
        yield {"event": "result", "result": {"name": "one", "status": "skipped", "reason": "too large"}}
        raise KeyboardInterrupt

    monkeypatch.setattr(harness, "run_children", children)
    path = tmp_path / "report.json"
    assert __main__.main(["--quick", "--json", str(path)]) == 130
    assert [r["name"] for r in json.loads(path.read_text())["results"][harness.RESIDENT]] == ["one"]
    output = capsys.readouterr()
    assert "interrupted: 1 of" in output.err and "too large" in output.out


def test_two_runs_agree_or_their_ratios_are_named():
    def run(value):
        against = {"stock best": {"window": {"value": value, "spread": 0.01}}}
        return {"results": {"resident": [{"name": "a", "status": "ok", "against": against}]}}

    assert agreement.rows(run(2.2), run(2.0)) == ([], "1 of 1 ratios agree within 15 %")
    rows, words = agreement.rows(run(2.4), run(2.0))
    assert rows == [["resident", "a", "stock best", "window", "2.000", "2.400", "+20 %", "0 %"]]
    assert words == "0 of 1 ratios agree within 15 %"


def test_the_command_end_to_end(tmp_path, capsys):
    pytest.importorskip("pytest_benchmark")
    report, exchanged = tmp_path / "report.json", tmp_path / "exchanged.json"
    arguments = ["--quick", "--only", "window/tiny", "--only", "bogus", "--json", str(report)]
    arguments += ["--provider", "stock best", "--provider", "nobody"]
    arguments += ["--pytest-benchmark-json", str(exchanged)]
    assert __main__.main([*arguments, "--plots", str(tmp_path)]) == 0
    found = json.loads(report.read_text())
    names = {benchmark["name"] for benchmark in json.loads(exchanged.read_text())["benchmarks"]}
    assert names == {"window/tiny/K=2[fastaccum]", "window/tiny/K=2[stock best]"}
    assert "samples" not in found["results"][harness.RESIDENT][-1]
    results = {r["name"]: r for r in found["results"][harness.RESIDENT]}
    assert results["window/tiny/K=2"]["status"] == "ok"
    assert results["bogus"]["status"] == "skipped"
    assert found["environment"]["torch"] == torch.__version__
    printed = capsys.readouterr().out
    assert "stock best" in printed and "bogus" in printed and "Goals" in printed
    assert "this case has no provider of that name" in printed and "stock loop" not in printed
    assert __main__.main(["--quick", "--only", "window/tiny", "--compare", str(report)]) == 0
    assert "ratios agree within 15 %" in capsys.readouterr().out
    arguments = ["--quick", "--only", "window/tiny", "--compare", str(report), "--json", str(exchanged)]
    assert __main__.main(arguments) == 0
    agreement_ = json.loads(exchanged.read_text())["agreement"]
    assert agreement_["with"] == found["environment"]["commit"] and "ratios agree" in agreement_["words"]
