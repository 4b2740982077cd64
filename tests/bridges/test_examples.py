"""The examples run as they stand, and do what they say."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="runs from a checkout")


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda name: runpy.run_path(str(EXAMPLES / name))


def test_accelerate(run, capsys):
    state = pytest.importorskip("accelerate").state
    for kind in (state.AcceleratorState, state.GradientState, state.PartialState):
        kind._reset_state()
    names = run("accelerate_loop.py")
    # Windows of 4, 4 and 2 micro-batches.
    assert names["optimizer"].state[names["model"].weight]["step"] == 3
    assert "norm of the last window" in capsys.readouterr().out


def test_transformers(run, capsys):
    pytest.importorskip("transformers")
    names = run("transformers_trainer.py")
    assert names["trainer"].state.global_step == 3 and names["trainer"].accumulator.stepped
    assert "norm of the last window" in capsys.readouterr().out


def test_lightning(run, capsys):
    pytest.importorskip("lightning")
    run("lightning_trainer.py")
    assert "3 updates" in capsys.readouterr().out


def test_tensorboard(run, tmp_path):
    """The file is read back as TensorBoard reads it."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    names = run("tensorboard_log.py")
    events = EventAccumulator(str(tmp_path / "runs"))
    events.Reload()
    kinds = ("norm", "skipped", "clip_share", "bytes_moved", "noise_scale", "recommended_accumulation_steps")
    assert {f"fastaccum/{kind}" for kind in kinds} == set(events.Tags()["scalars"])

    def values(kind):
        return {event.step: event.value for event in events.Scalars(f"fastaccum/{kind}")}

    # The first look starts the counts: clip share and bytes are there from the second window on.
    assert set(values("norm")) == {1, 2, 3, 4, 5} and set(values("clip_share")) == {2, 3, 4, 5}
    assert values("norm")[5] == pytest.approx(float(names["optimizer"].norm))
    assert set(values("skipped").values()) == {0.0}
    clipped, norms = 0, values("norm")
    for window in (2, 3, 4, 5):
        clipped += norms[window] > 1.0
        assert values("clip_share")[window] == pytest.approx(clipped / (window - 1))
    # 9 elements: 12 bytes for each of three adds, 28 for the update.
    assert set(values("bytes_moved").values()) == {9 * (12 * 3 + 28)}
