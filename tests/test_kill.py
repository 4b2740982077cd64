"""Killed at any point, also inside a save, and resumed: the same parameters, bit for bit.

A server process imports torch once and forks a child per attempt; the kernel's SIGKILL leaves no handler
a chance. The server is a process of its own because a fork takes only the thread that calls it along.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from fastaccum import FusedAccumulator  # noqa: E402
from tests.oracle import assert_identical, parameter, send, stock, unchanged  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the attempts are forked")

MICRO_BATCHES = 48
SAVE_EVERY = 3  # windows are of 4: most saves lie inside one
STAGES = ("begun", "half written", "written", "synced", "renamed")
KINDS = {
    "AdamW": (torch.optim.AdamW, {"amsgrad": True}, {"max_norm": 0.5}),
    "SGD, taken in backward": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, {"take": "backward"}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9}, {"max_norm": 0.5}),
    "masters": (torch.optim.Adam, {}, {"master_weights": True}),
}


def build(name):
    kind, options, accumulator = KINDS[name]
    torch.manual_seed(7)
    dtype = torch.bfloat16 if name == "masters" else torch.float32
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)
    optimizer = FusedAccumulator(stock(kind, model.parameters(), lr=0.05, **options), 4, **accumulator)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def save_atomically(state, path, reached=lambda stage: None):
    """A new file, on the disk before it takes the old one's name."""
    temporary = path.with_suffix(".new")
    reached("begun")
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        if reached("half written") == "cut":
            file.truncate(file.tell() // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        reached("written")
        os.fsync(file.fileno())
    reached("synced")
    os.replace(temporary, path)
    reached("renamed")


def train(name, path=None, reached=lambda stage: None):
    """Trains to the end from the last save, if there is one; returns what a run leaves."""
    model, optimizer, scheduler = build(name)
    first = 0
    if path is not None and path.exists():
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        first = saved["next"]
    for i in range(first, MICRO_BATCHES):
        data = torch.Generator().manual_seed(i)
        rows = 2 + i % 3
        x = torch.randn(rows, 6, generator=data).to(next(model.parameters()).dtype)
        optimizer.backward(model(x).square().mean(), weight=rows)
        optimizer.step()
        if optimizer.updated:
            scheduler.step()
        if path is not None and (i + 1) % SAVE_EVERY == 0:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "next": i + 1,
            }
            save_atomically(state, path, reached)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def warm_up(name, path):
    """Imports what torch imports on first use, once; no backward, after which autograd may not be forked."""
    model, optimizer, scheduler = build(name)
    for _ in range(4):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    scheduler.step()
    save_atomically({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    optimizer.load_state_dict(torch.load(path, weights_only=True)["optimizer"])


def fork(work):
    """Runs ``work`` in a child process; returns its number."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child


def attempt(name, path, rng, duration, inside_a_save):
    """One child that is killed, or comes to its end; returns what happened."""
    if inside_a_save:
        stage, countdown = rng.choice(STAGES), rng.randrange(4)

        def reached(now):
            nonlocal countdown
            if now != stage:
                return None
            countdown -= 1
            if countdown >= 0:
                return None
            if stage == "half written":
                return "cut"
            os.kill(os.getpid(), signal.SIGKILL)

        delay = None
    else:
        delay, reached = rng.uniform(0.0, duration), lambda stage: None

    def work():
        torch.save(train(name, path, reached), path.with_suffix(".end"))

    child = fork(work)
    if delay is not None:
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)  # a child that has ended is a zombie until it is waited for
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return stage if inside_a_save else "anywhere"
    assert os.WEXITSTATUS(status) == 0
    return "ended"


def serve(folder, seed, wanted):
    """For each kind, run after run, each killed again and again until it ends, until there were enough."""
    torch.set_num_threads(1)
    rng = random.Random(seed)
    for number, name in enumerate(KINDS):
        place = Path(folder) / str(number)
        place.mkdir()
        print(json.dumps({"name": name, **kill_and_resume(name, place, rng, wanted)}), flush=True)


def kill_and_resume(name, folder, rng, wanted):
    warm_up(name, folder / "warm")
    expected = folder / "expected"
    os.waitpid(fork(lambda: torch.save(train(name), expected)), 0)
    begun = time.perf_counter()
    os.waitpid(fork(lambda: train(name, folder / "timed")), 0)
    duration = time.perf_counter() - begun
    kills, resumed, runs = Counter(), Counter(), 0
    while sum(kills.values()) < wanted:
        path = folder / f"run{runs}"
        for number in range(200):
            inside_a_save = number < 30 and number % 3 == 0
            what = attempt(name, path, rng, duration if number < 30 else 20 * duration, inside_a_save)
            if what == "ended":
                break
            kills[what] += 1
            if path.exists():  # whatever is there under the right name is whole
                resumed[torch.load(path, weights_only=True)["next"] % 4] += 1
        assert_identical(torch.load(expected), torch.load(path.with_suffix(".end")))
        runs += 1
    return {"kills": kills, "resumed": resumed, "runs": runs}


def test_killed_at_random_and_resumed_bit_for_bit(tmp_path):
    """For each kind at least 16 kills; 4 kinds make more than 50, and more than 10 inside a save."""
    seed = random.SystemRandom().randrange(1 << 30)
    code = f"from tests.test_kill import serve; serve({str(tmp_path)!r}, {seed}, 16)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"seed {seed}\n{done.stdout}\n{done.stderr}"
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [result["name"] for result in results] == list(KINDS)
    kills, resumed = Counter(), Counter()
    for result in results:
        kills.update(result["kills"])
        resumed.update(result["resumed"])
    inside = sum(n for what, n in kills.items() if what != "anywhere")
    assert sum(kills.values()) >= 50 and inside >= 10 and kills["anywhere"] >= 10, results
    assert sum(n for place, n in resumed.items() if place != "0") >= 10, f"not inside windows: {results}"


# ----------------------------------------------------------------------------------- what is saved


def tensors_of(value, name=""):
    """Every tensor of a nested state, by the path to it."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_of(item, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for key, item in enumerate(value):
            yield from tensors_of(item, f"{name}.{key}")


def with_tensors(value, tensors, name=""):
    """The same nested state with the tensors of these names."""
    if isinstance(value, torch.Tensor):
        return tensors[name]
    if isinstance(value, dict):
        return {key: with_tensors(item, tensors, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(with_tensors(item, tensors, f"{name}.{key}") for key, item in enumerate(value))
    return value


def odd_layouts(kind, **options):
    torch.manual_seed(2)
    params = [
        nn.Parameter(torch.randn(4, 3)),
        nn.Parameter(torch.randn(3, 5).t()),
        nn.Parameter(torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.randn(10)[::2]),
        nn.Parameter(torch.randn(())),
        nn.Parameter(torch.empty(0, 3)),
        nn.Parameter(torch.randn(7).bfloat16()),
    ]
    return params, FusedAccumulator(stock(kind, params, lr=0.01, **options), 3)


def micro_batch(params, optimizer, i):
    data = torch.Generator().manual_seed(i)
    send(params, [torch.randn(p.shape, generator=data).to(p.dtype) for p in params])
    optimizer.step()


FORMAT_KINDS = [
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.RMSprop, {"momentum": 0.9}),
]


@pytest.mark.parametrize(("kind", "options"), FORMAT_KINDS, ids=lambda v: getattr(v, "__name__", ""))
@pytest.mark.parametrize("held", [0, 1, 2])
def test_every_tensor_of_the_state_can_be_written_as_it_lies(kind, options, held):
    """Its own memory without gaps, none shared with another: safetensors refuses anything else."""
    params, optimizer = odd_layouts(kind, **options)
    for i in range(3 + held):
        micro_batch(params, optimizer, i)
    found = dict(tensors_of(optimizer.state_dict()))
    memory = [t.untyped_storage().data_ptr() for t in found.values() if t.numel()]
    assert len(set(memory)) == len(memory)
    assert not {p.untyped_storage().data_ptr() for p in params if p.numel()} & set(memory)
    # Stock's fused kernels read a state that lies otherwise than its parameter wrongly: the order stays.
    orders = {(p.shape, p.stride()) for p in params}
    for name, tensor in found.items():
        assert tensor.is_contiguous() or (tensor.shape, tensor.stride()) in orders, name
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size(), name


@pytest.mark.parametrize(("kind", "options"), FORMAT_KINDS, ids=lambda v: getattr(v, "__name__", ""))
@pytest.mark.parametrize("through", ["bytes", "safetensors"])
def test_state_through_a_file_of_named_tensors_goes_on_bit_for_bit(kind, options, through, tmp_path):
    """What comes back is row-major, whatever the memory order of the parameter."""
    results = []
    for save in (False, True):
        params, optimizer = odd_layouts(kind, **options)
        for i in range(12):
            if save and i == 7:
                state = optimizer.state_dict()
                found = {name: t.contiguous() for name, t in tensors_of(state)}
                if through == "safetensors":
                    files = pytest.importorskip("safetensors.torch")
                    files.save_file(found, tmp_path / "state")
                    found = files.load_file(tmp_path / "state")
                else:
                    found = {
                        name: torch.tensor(t.view(-1).view(torch.uint8).tolist(), dtype=torch.uint8)
                        .view(t.dtype)
                        .view(t.shape)
                        if t.numel()
                        else torch.empty_like(t)
                        for name, t in found.items()
                    }
                values = [p.detach().clone() for p in params]
                params, optimizer = odd_layouts(kind, **options)
                for p, value in zip(params, values, strict=True):
                    p.detach().copy_(value)
                optimizer.load_state_dict(with_tensors(state, found))
            micro_batch(params, optimizer, i)
        results.append([p.detach().contiguous() for p in params])
    assert_identical(*results)


def test_a_file_that_was_cut_anywhere_is_refused_and_loads_nothing(tmp_path):
    p = parameter(1.0, 2.0)
    optimizer = FusedAccumulator(torch.optim.AdamW([p], lr=0.1), 3)
    for i in range(4):
        micro_batch([p], optimizer, i)
    path = tmp_path / "state"
    torch.save(optimizer.state_dict(), path)
    whole = path.read_bytes()
    for seed in range(20):
        path.write_bytes(whole[: random.Random(seed).randrange(len(whole))])
        unchanged(
            optimizer,
            lambda: optimizer.load_state_dict(torch.load(path, weights_only=True)),
            (RuntimeError, EOFError, OSError, ValueError),
            ".",
        )
