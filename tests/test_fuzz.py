"""Random calls to FusedAccumulator and to a slow model of its contract: they agree after each.

Gradients are small multiples of 1/4 and weights small integers, so every sum is exact and the two
differ only by the rounding of the average, the clip and the update. After each comparison the model
takes over the wrapper's parameters and state bit for bit: errors cannot hide in drift, and a call
that makes no update must leave every bit alone.

FASTACCUM_FUZZ=20 runs 20 times as many examples.
"""

from __future__ import annotations

import copy
import io
import math
import os
import pickle

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, assume, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import (  # noqa: E402
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import fastaccum  # noqa: E402
from fastaccum import FusedAccumulator, dispatch, updates  # noqa: E402
from tests.contract_model import FUSED, ContractModel, same_number  # noqa: E402

MULTIPLE = float(os.environ.get("FASTACCUM_FUZZ", "1"))

# name -> (class, options to choose from)
OPTIMIZERS = {
    "sgd": (
        torch.optim.SGD,
        [
            {},
            {"momentum": 0.9},
            {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
            {"momentum": 0.8, "dampening": 0.5, "maximize": True},
        ],
    ),
    "adam": (
        torch.optim.Adam,
        [
            {"weight_decay": 0.01},
            {"amsgrad": True},
            {"maximize": True, "betas": (0.5, 0.9)},
            {"lr": torch.tensor(0.03, dtype=torch.float64)},
        ],
    ),
    "adamw": (
        torch.optim.AdamW,
        [{}, {"weight_decay": 0.1, "amsgrad": True}, {"betas": (0.0, 0.99)}],
    ),
    "rmsprop": (torch.optim.RMSprop, [{}, {"momentum": 0.9, "weight_decay": 0.01}]),
}
CHANGES = {  # of a group's options while training goes on
    "sgd": [{"momentum": 0.9}, {"weight_decay": 0.1}],
    "adam": [{"weight_decay": 0.1}, {"eps": 1e-3}],
    "adamw": [{"weight_decay": 0.0}, {"betas": (0.5, 0.5)}],
    "rmsprop": [{"weight_decay": 0.1}],
}
SHAPES = ("matrix", "scalar", "empty", "transposed", "channels_last", "gaps", "long", "one")
DTYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16)

# One update from an identical state, against float64: (relative error, error relative to the largest value
# so far), beside the range of contract_model.exactly. 16-bit: the sums are float32's, and what is written is
# rounded once: half a unit in the last place more.
TOLERANCES = {
    torch.float32: (1e-5, 1e-6),
    torch.float64: (1e-12, 1e-14),
    torch.bfloat16: (1e-5, 1e-6),
}

seeds = st.integers(0, 2**16)
subsets = st.frozensets(st.integers(0, 5), max_size=4)  # of the parameters; empty means all
weights = st.tuples(st.sampled_from(["weight", "count"]), st.sampled_from([1, 3, 2, 0, 5]))
norms = st.sampled_from([None, 0.5, 4.0, 1000.0])


def make_param(shape: str, dtype: torch.dtype, seed: int) -> torch.nn.Parameter:
    """A parameter in one of the memory orders that models have."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)

    data = {
        "matrix": lambda: randn(3, 5),
        "scalar": lambda: randn(),
        "empty": lambda: randn(0, 4),
        "transposed": lambda: randn(4, 6).t(),
        "channels_last": lambda: randn(2, 3, 2, 2).to(memory_format=torch.channels_last),
        "gaps": lambda: randn(4, 6)[:, ::2],
        "long": lambda: randn(1061),
        "one": lambda: randn(1),
    }[shape]()
    return torch.nn.Parameter(data)


def make_grad(param: torch.Tensor, seed: int) -> torch.Tensor:
    """Multiples of 1/4 up to 2: sums of a window are exact in every dtype."""
    values = torch.randint(-8, 9, param.shape, generator=torch.Generator().manual_seed(seed))
    return values.to(param.dtype) / 4


class _Fails(torch.autograd.Function):
    """Identity whose backward raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("this backward was told to fail")


class _Both(torch.autograd.Function):
    """Its second argument; backward goes on into both."""

    @staticmethod
    def forward(ctx, first, second):
        return second.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.zeros_like(grad), grad


class Machine(RuleBasedStateMachine):
    """Drives both sides; subclasses say which optimizer, backend and ``take``."""

    optimizer_name = "sgd"
    backend = "reference"
    take = "step"

    # ---------------------------------------------------------------------------------- beginning

    @initialize(
        shapes=st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES)), min_size=1, max_size=4),
        steps=st.integers(1, 4),
        option=st.integers(0, 3),
        clipping=st.one_of(
            st.just({}),
            st.builds(lambda x: {"max_norm": x}, norms),
            st.builds(lambda x: {"max_value": x}, st.sampled_from([0.25, 1.5])),
        ),
        norm_type=st.sampled_from([2.0, 2.0, math.inf, 1.0, 3.0]),
        reduction=st.sampled_from(["mean", "mean", "sum"]),
        nonfinite=st.sampled_from(["skip", "skip", "propagate", "error"]),
        drops=st.sampled_from([False, False, True]),
        masters=st.sampled_from([False, False, True]),
        scaler=st.sampled_from([None, None, None, (8.0, 2), (4.0, 1000)]),
        tracks=st.booleans(),
    )
    def start(
        self, shapes, steps, option, clipping, norm_type, reduction, nonfinite, drops, masters, scaler, tracks
    ):
        cls, choices = OPTIMIZERS[self.optimizer_name]
        # Where a device decides, a dropped gradient is 0 and not absent: the host does not know of it.
        drops = drops and self.take == "step" and dispatch.load(self.backend, dispatch.CPU).synchronous
        self.options = {
            **clipping,
            "norm_type": norm_type,
            "reduction": reduction,
            "nonfinite": nonfinite,
            "take": self.take,
            "nonfinite_micro_batch": "drop" if drops else "keep",
            "master_weights": masters and cls in FUSED,
        }
        self.tracks = tracks
        self.hyper = {"lr": 0.05, **choices[option % len(choices)], "foreach": False}
        if cls is torch.optim.SGD or cls in (torch.optim.Adam, torch.optim.AdamW):
            self.hyper["fused"] = False
        self.params = [make_param(s, d, i) for i, (s, d) in enumerate(shapes)]
        self.twins = [self._twin(s, d, i) for i, (s, d) in enumerate(shapes)]
        inner = cls(self.params, **copy.deepcopy(self.hyper))
        self.scaler = None
        if scaler:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=scaler[0], growth_interval=scaler[1])
        self.wrapper = FusedAccumulator(
            inner, steps, backend=self.backend, scaler=self.scaler, **self.options
        )
        stock = cls(self.twins, **copy.deepcopy(self.hyper))
        self.model = ContractModel(stock, steps, scaler=scaler, **self.options)
        self.seen_updates = 0
        self.scales = {}
        self.snapshot = None
        self.windows_not_counted = 0  # of the model's: the state knows nothing of them
        self._watch()

    def _twin(self, shape, dtype, seed):
        """The same parameter for the model: a 16-bit one with a master is that master, which may be wider."""
        twin = make_param(shape, dtype, seed)
        if self.options["master_weights"] and dtype in updates.SIXTEEN_BIT:
            twin = torch.nn.Parameter(twin.detach().float())
        return twin

    def _watch(self):
        """Counts the hooks of the present wrapper and remembers the tensors that must stay."""
        self.hooks_fired = [0, 0]
        self.windows_before = self.windows_seen = self.model.windows
        self.model.norms = {}

        def count(i):
            def hook(*_):
                self.hooks_fired[i] += 1

            return hook

        self.wrapper.register_step_post_hook(count(0))
        self.wrapper.optimizer.register_step_post_hook(count(1))
        self.norm, self.skipped = self.wrapper.norm, self.wrapper.skipped
        if self.tracks:
            self.wrapper.track(parameter_norms=True, noise_scale=self.take == "step")
            self.wrapper.stats()

    # ------------------------------------------------------------------------------------- helpers

    def both(self, real, expected):
        """Calls both sides; they return the same, or raise the same kind of error."""
        results = []
        for call in (real, expected):
            try:
                results.append(("returned", call()))
            except (ValueError, RuntimeError, ArithmeticError) as error:
                results.append(("raised", type(error)))
                if call is real:
                    message = str(error)
        if results[0] != results[1]:
            note = f": {message}" if results[0][0] == "raised" else ""
            raise AssertionError(f"the wrapper {results[0]}{note}; the contract says {results[1]}")
        return results[0][0] == "returned"

    def chosen(self, subset):
        """Numbers of the chosen parameters that can get a gradient."""
        numbers = [i for i in range(len(self.params)) if not subset or i in subset]
        return [i for i in numbers if self.params[i].requires_grad]

    def loss(self, grads, expanded=False, fails=False):
        """A loss with these gradients; if it fails, it does so after they arrived."""
        total = None
        # Made first, so backward reaches it last.
        failing = _Fails.apply(torch.zeros((), dtype=torch.float64, requires_grad=True))
        for i, grad in grads.items():
            param = self.params[i]
            term = param.sum() * grad if expanded else (param * grad).sum()
            total = term.double() if total is None else total + term.double()
        return _Both.apply(failing, total) if fails else total

    # --------------------------------------------------------------------------------------- rules

    @rule(
        seed=seeds,
        subset=subsets,
        how=st.sampled_from(["loss", "wrapper", "weighted"]),
        weight=weights,
        poison=st.sampled_from([None] * 9 + [math.inf, -math.inf, math.nan]),
        expanded=st.booleans(),
    )
    def backward(self, seed, subset, how, weight, poison, expanded):
        numbers = self.chosen(subset)
        assume(numbers and not self.model.broken)
        how = "wrapper" if how == "loss" and self.scaler else how  # the scaled loss comes from the wrapper
        zero = how == "weighted" and weight[1] == 0
        # A sum over no items has the gradient 0. What was added before may be another, and is not taken out.
        assume(not (zero and self.model.taken_plain))
        grads, expanded_grads = {}, {}
        for i in numbers:
            grad = make_grad(self.params[i], seed + i)
            if zero and weight[0] == "count":
                grad.zero_()  # a sum over no items
            elif zero:
                grad.fill_(math.nan)  # a mean over no items
            elif poison is not None and i == numbers[-1] and grad.numel():
                grad.view(-1)[seed % grad.numel()] = poison
            if expanded and grad.numel():
                expanded_grads[i] = grad.flatten()[0].clone()
                grad = torch.full_like(grad, expanded_grads[i].item())
            grads[i] = grad
        expanded = len(expanded_grads) == len(grads)
        if not expanded:
            for i in expanded_grads:
                grads[i] = make_grad(self.params[i], seed + i)
            if zero:
                grads = {i: torch.zeros_like(g) for i, g in grads.items()}
        kwargs = {weight[0]: weight[1]} if how == "weighted" else {}
        loss = self.loss(expanded_grads if expanded else grads, expanded)
        self.both(
            loss.backward if how == "loss" else lambda: self.wrapper.backward(loss, **kwargs),
            lambda: self.model.backward(
                {self.twins[i]: g for i, g in grads.items()}, by_wrapper=how != "loss", **kwargs
            ),
        )

    @precondition(lambda self: self.take == "step" and not (self.scaler or self.model.is_stuck))
    @rule(
        seed=seeds,
        subset=subsets,
        micro_batches=st.lists(
            st.tuples(
                st.sampled_from([1.0, 2.0, 0.25, 1024.0]), st.booleans(), st.sampled_from([0, 0, 0, 1])
            ),
            min_size=1,
            max_size=4,
        ),
    )
    def train_scaled(self, seed, subset, micro_batches):
        """Micro-batches by the explicit GradScaler protocol: each its scale, unscale_(), an inf."""
        numbers = [i for i in self.chosen(subset) if self.params[i].numel()]
        assume(numbers)
        self.zero_grad(True)  # what is pending would be taken for scaled
        for k, (scale, unscale, inf) in enumerate(micro_batches):
            if self.model.is_stuck:
                return
            grads = {i: make_grad(self.params[i], seed + 10 * k + i) for i in numbers}
            if inf:
                grads[numbers[0]].view(-1)[seed % grads[numbers[0]].numel()] = math.inf
            if not self.both(
                lambda grads=grads, scale=scale, unscale=unscale: self._scaled(grads, scale, unscale),
                lambda grads=grads, inf=inf: self._expect_scaled(grads, bool(inf)),
            ):
                if self.model.is_pending:
                    self.zero_grad(True)  # refused before it was taken: in .grad it is scaled
            self.agree()

    def _scaled(self, grads, scale, unscale):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        scaler.scale(self.loss(grads)).backward()
        if unscale:
            scaler.unscale_(self.wrapper)
        try:
            scaler.step(self.wrapper)
        finally:  # torch leaves them where a step has raised
            vars(self.wrapper).pop("found_inf", None)
            vars(self.wrapper).pop("grad_scale", None)

    def _expect_scaled(self, grads, inf):
        self.model.backward({self.twins[i]: g for i, g in grads.items()}, by_wrapper=False)
        self.model.step(found_inf=inf)

    @rule(
        seed=seeds,
        n=st.integers(1, 5),
        weight=st.one_of(st.none(), weights),
        poison=st.sampled_from([None] * 4 + [0, 1]),
    )
    def train(self, seed, n, weight, poison):
        """Several micro-batches as an ordinary loop has them."""
        kwargs = {weight[0]: weight[1] or 1} if weight else {}
        for k in range(n):
            numbers = self.chosen(())
            if not numbers or self.model.broken:
                return
            grads = {i: make_grad(self.params[i], seed + 10 * k + i) for i in numbers}
            if k == poison and grads[numbers[0]].numel():
                grads[numbers[0]].view(-1)[-1] = math.nan
            loss, twins = self.loss(grads), {self.twins[i]: g for i, g in grads.items()}
            self.both(
                lambda loss=loss: self.wrapper.backward(loss, **kwargs),
                lambda twins=twins: self.model.backward(twins, **kwargs),
            )
            self.both(self.wrapper.step, self.model.step)
            self.agree()

    @rule(
        how=st.sampled_from(["none", "none", "weighted", "tensor", "closure", "both"]),
        weight=weights,
        seed=seeds,
    )
    def step(self, how, weight, seed):
        kind, items = weight
        if self.take == "backward":
            items = items or 2  # gradients of no items cannot be taken out again
        if how == "both":
            kwargs = {"weight": items, "count": items}
        else:
            kwargs = {kind: items} if how in ("weighted", "tensor") else {}
        # A weight that stays on a device is compared with nothing: the model, which knows it, would refuse.
        known = dispatch.load(self.wrapper._options.backend, dispatch.CPU).synchronous
        given = {k: torch.tensor(float(v)) if how == "tensor" and known else v for k, v in kwargs.items()}
        numbers = self.chosen(())
        if how == "closure" and numbers and not self.model.broken and self.scaler is None:
            grads = {i: make_grad(self.params[i], seed + i) for i in numbers}

            def closure():
                loss = self.loss(grads)
                loss.backward()
                return loss

            def expected():
                self.model.backward({self.twins[i]: g for i, g in grads.items()}, by_wrapper=False)
                self.model.step()

            def real():
                assert self.wrapper.step(closure) is not None

            self.both(real, expected)
        else:
            self.both(lambda: self.wrapper.step(**given), lambda: self.model.step(**kwargs))

    @rule()
    def flush(self):
        self.both(self.wrapper.flush, self.model.flush)

    @rule()
    def discard(self):
        self.both(self.wrapper.discard, self.model.discard)

    @precondition(lambda self: not self.model.broken)
    @rule(set_to_none=st.sampled_from([True, True, False]))
    def zero_grad(self, set_to_none):
        self.both(lambda: self.wrapper.zero_grad(set_to_none), lambda: self.model.zero_grad(set_to_none))

    @rule(i=st.integers(0, 5))
    def lose_a_gradient(self, i):
        """Something clears ``.grad`` behind the wrapper's back."""
        assume(i < len(self.params))
        self.params[i].grad = self.twins[i].grad = None

    @precondition(lambda self: self.scaler is None)
    @rule(i=st.integers(0, 5), seed=seeds, sparse=st.booleans())
    def replace_a_gradient(self, i, seed, sparse):
        assume(i < len(self.params))
        grad = make_grad(self.params[i], seed)
        self.twins[i].grad = grad.to(self.twins[i].dtype, copy=True)
        self.params[i].grad = grad.to_sparse() if sparse and grad.dim() == 2 else grad

    @precondition(lambda self: not self.model.broken and self.scaler is None)
    @rule(seed=seeds, subset=subsets)
    def backward_fails(self, seed, subset):
        numbers = self.chosen(subset)
        assume(numbers)
        grads = {i: make_grad(self.params[i], seed + i) for i in numbers}
        loss = self.loss(grads, fails=True)
        self.both(
            loss.backward,
            lambda: self.model.backward(
                {self.twins[i]: g for i, g in grads.items()}, raises=True, by_wrapper=False
            ),
        )
        if self.take == "step":
            self.zero_grad(True)

    @rule(i=st.integers(0, 5), frozen=st.booleans())
    def freeze(self, i, frozen):
        assume(i < len(self.params))
        self.params[i].requires_grad_(not frozen)
        self.twins[i].requires_grad_(not frozen)

    @precondition(lambda self: len(self.wrapper.param_groups) < 3)
    @rule(
        shape=st.sampled_from(SHAPES),
        dtype=st.sampled_from(DTYPES),
        own=st.sampled_from([{}, {"max_norm": 0.5}, {"max_norm": None, "lr": 0.02}]),
    )
    def add_param_group(self, shape, dtype, own):
        seed = len(self.params)
        param, twin = make_param(shape, dtype, seed), self._twin(shape, dtype, seed)
        added = self.both(
            lambda: self.wrapper.add_param_group({"params": [param], **own}),
            lambda: self.model.add_param_group({"params": [twin], **own}),
        )
        if added:
            self.params.append(param)
            self.twins.append(twin)

    @rule()
    def add_a_parameter_twice(self):
        self.both(
            lambda: self.wrapper.add_param_group({"params": [self.params[0]]}),
            lambda: self.model.add_param_group({"params": [self.twins[0]]}),
        )

    @rule(change=st.integers(0, 3), group=st.integers(0, 2), lr=st.sampled_from([0.05, 0.02, 0.0]))
    def change_options(self, change, group, lr):
        changes = CHANGES[self.optimizer_name]
        for optimizer in (self.wrapper, self.model.optimizer):
            groups = optimizer.param_groups
            groups[group % len(groups)].update({"lr": lr, **changes[change % len(changes)]})

    @rule(steps=st.integers(1, 4))
    def set_accumulation_steps(self, steps):
        assume(not self.model.broken)
        self.both(
            lambda: setattr(self.wrapper, "accumulation_steps", steps),
            lambda: setattr(self.model, "accumulation_steps", steps),
        )
        assert self.wrapper.accumulation_steps == self.model.accumulation_steps

    @precondition(lambda self: self.model.max_value is None)
    @rule(max_norm=norms)
    def set_max_norm(self, max_norm):
        self.wrapper.max_norm = self.model.max_norm = max_norm

    @rule(max_norm=st.sampled_from([0.5, 4.0, 1000.0]))
    def clip(self, max_norm):
        def real():
            norm_type = self.options["norm_type"]
            assert fastaccum.clip_grad_norm_(self.wrapper, max_norm, norm_type) is self.norm

        self.both(real, lambda: self.model.clip(max_norm))

    @rule(tracks=st.booleans())
    def track(self, tracks):
        assume(tracks != self.tracks)
        self.tracks = tracks
        self.wrapper.track(parameter_norms=tracks, noise_scale=tracks and self.take == "step")
        self.wrapper.stats()
        self.model.norms = {}  # from the next window on

    # -------------------------------------------------------------------------------- checkpoints

    def _may_save(self):
        # A clip that was asked for and a window that could not be closed are not in a checkpoint.
        return not self.model.broken and not self.model.is_stuck and self.model.clip_once is None

    @precondition(_may_save)
    @rule()
    def take_snapshot(self):
        saved = {}
        self.both(
            lambda: saved.update(real=self.wrapper.state_dict()),
            lambda: saved.update(model=self.model.state_dict()),
        )
        if "real" in saved:
            stream = io.BytesIO()
            torch.save(saved["real"], stream)
            stream.seek(0)
            saved["real"] = torch.load(stream, weights_only=True)
            saved["values"] = [p.detach().clone() for p in self.params]
            saved["masters"] = [p.detach().clone() for p in self.twins]
            saved["steps"] = self.model.accumulation_steps
            saved["windows"] = self.model.windows - self.windows_not_counted
            self.snapshot = saved

    @precondition(lambda self: self.snapshot is not None and not self.model.broken)
    @rule(elsewhere=st.booleans(), window=st.sampled_from([True, True, False]))
    def load_snapshot(self, elsewhere, window):
        saved = self.snapshot
        assume(len(saved["values"]) == len(self.params))
        assume(elsewhere or saved["steps"] == self.model.accumulation_steps)
        assume(elsewhere or not self.model.is_pending)
        real, model = dict(saved["real"]), dict(saved["model"])
        if not window:
            real.pop("fastaccum")
            model.pop("window")
        if elsewhere:
            self._start_elsewhere(saved["steps"])
        with torch.no_grad():
            for param, twin, value in zip(self.params, self.twins, saved["values"], strict=True):
                param.copy_(value)
                # Without masters in the checkpoint, the present ones stay where they round to the parameter.
                kept = twin.to(value.dtype) == value
                twin.copy_(torch.where(kept, twin, value.to(twin.dtype)) if not elsewhere else value)
            for twin, master in zip(self.twins, saved["masters"] if window else (), strict=False):
                twin.copy_(master)
        self.wrapper.load_state_dict(real)
        self.model.load_state_dict(model)
        if window:
            self.windows_not_counted = self.model.windows - saved["windows"]

    def _start_elsewhere(self, steps):
        """A new process: new parameters, optimizer and wrapper, with groups as they are now."""
        cls, _ = OPTIMIZERS[self.optimizer_name]
        groups = [len(group["params"]) for group in self.wrapper.param_groups]
        frozen = [not p.requires_grad for p in self.params]
        self.params = [torch.nn.Parameter(p.detach().clone()) for p in self.params]
        position = 0
        for number, n in enumerate(groups):
            members = self.params[position : position + n]
            position += n
            if number == 0:
                inner = cls(members, **copy.deepcopy(self.hyper))
            else:
                inner.add_param_group({"params": members})
        for param, is_frozen in zip(self.params, frozen, strict=True):
            param.requires_grad_(not is_frozen)
        options = dict(self.options)
        if self.model.max_value is None:
            options["max_norm"] = self.model.max_norm
        if self.scaler is not None:  # its state goes to a new one
            state = self.scaler.state_dict()
            self.scaler = torch.amp.GradScaler("cpu")
            self.scaler.load_state_dict(state)
        self.wrapper = FusedAccumulator(inner, steps, backend=self.backend, scaler=self.scaler, **options)
        self.model.discard()
        self.model.accumulation_steps = steps
        self.model.updated = self.model.stepped = False
        self.model.norm, self.model.skipped = 0.0, 0
        self.windows_not_counted = self.model.windows
        self._watch()

    @precondition(_may_save)
    @rule(pickled=st.booleans())
    def copy_everything(self, pickled):
        """A copy goes on; what is pending is not part of it."""
        everything = (self.params, self.wrapper, self.scaler)
        if self.model.pending and self.model.micro_step:
            self.both(lambda: copy.deepcopy(everything), self.model.state_dict)
            return
        # Hooks of the test hold the machine.
        self.wrapper.optimizer._optimizer_step_post_hooks.clear()
        original = self.wrapper
        if pickled:
            self.params, self.wrapper, self.scaler = pickle.loads(pickle.dumps(everything))
        else:
            self.params, self.wrapper, self.scaler = copy.deepcopy(everything)
        original.discard()
        frozen = [not p.requires_grad for p in self.twins]
        assert frozen == [not p.requires_grad for p in self.params]
        self.model._forget_pending()
        for twin in self.twins:
            twin.grad = None
        self._watch()

    # ----------------------------------------------------------------------------------- agreement

    @invariant()
    def agree(self):
        wrapper, model = self.wrapper, self.model
        assert wrapper.micro_step == model.micro_step
        assert wrapper.updated == model.updated
        assert wrapper.stepped == model.stepped
        assert int(wrapper.skipped) == model.skipped
        assert same_number(float(wrapper.norm), model.norm, 5e-7), (wrapper.norm, model.norm)
        assert wrapper.norm is self.norm and wrapper.skipped is self.skipped
        assert wrapper.norm.dtype == torch.float32 and wrapper.skipped.dtype == torch.int64
        assert self.hooks_fired == [model.windows - self.windows_before] * 2

        exact = model.updates == self.seen_updates
        self.seen_updates = model.updates
        stock = model.optimizer
        waits = dispatch.load(wrapper._options.backend, dispatch.CPU).synchronous
        masters = self._masters()
        if self.scaler is not None and self.scaler._scale is not None:
            assert self.scaler.get_scale() == model.scale
        if self.tracks and model.windows > self.windows_seen:
            stats = wrapper.stats()
            assert stats["window"] == model.windows - self.windows_not_counted
            assert stats["skipped"] == model.skipped and same_number(stats["norm"], model.norm, 5e-7)
            self._same_norms(wrapper.parameter_norms)
        self.windows_seen = model.windows
        for i, (param, twin) in enumerate(zip(self.params, self.twins, strict=True)):
            where = f"parameter {i}, shape {list(param.shape)}, {param.dtype}"
            value = param.detach()
            if twin.dtype != param.dtype:
                value = masters.get(i, value.to(twin.dtype) if exact else twin.detach())
                self._equal(param.detach(), value.to(param.dtype), f"what its master rounds to: {where}")
            self._same(value, twin, twin.detach(), exact, "value", where)
            self._equal(param.grad, twin.grad, f".grad of {where}")
            if not model.pending:
                mean = model.grad(twin)
                got = wrapper.grad(param)
                self._equal(got, mean, f"grad() of {where}", rtol=1e-6)
            if twin not in stock.state:
                # Where a device decides whether to skip, state is made before: zeros, as if there were none.
                made = any(bool(value.any()) for value in wrapper.state.get(param, {}).values())
                assert not made and (not waits or param not in wrapper.state), f"state of {where}"
                continue
            assert param in wrapper.state, f"state of {where}"
            got, wanted = wrapper.state[param], stock.state[twin]
            assert list(got) == list(wanted), f"state of {where}: {list(got)}, not {list(wanted)}"
            for key, value in wanted.items():
                if key == "step":
                    assert float(got[key]) == float(value), f"step of {where}"
                elif torch.is_tensor(value):
                    self._same(got[key], twin, value, exact, key, where)
        self._take_over()

    def _same(self, got, twin, stock, exact, key, where):
        """Equal bits where nothing was updated, else near float64; ``stock`` is the twin's value."""
        assert got.dtype == stock.dtype and got.shape == stock.shape, (
            f"{key} of {where} is {got}, not {stock}"
        )
        largest = float(stock.double().nan_to_num(0.0, 0.0, 0.0).abs().max()) if stock.numel() else 0.0
        scale = self.scales[key] = max(self.scales.get(key, 1.0), largest)
        if exact or twin not in self.model.exact:
            torch.testing.assert_close(
                got, stock, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{key} of {where}\n{text}"
            )
            return
        truth, spread = self.model.exact[twin][key]
        rtol, atol = TOLERANCES[got.dtype]
        bound = rtol * truth.abs() + atol * scale + spread
        if got.dtype == torch.bfloat16:
            bound = bound + torch.ldexp(
                torch.ones_like(truth), torch.frexp(truth.nan_to_num(0.0)).exponent - 9
            )
        if type(self.model.optimizer) not in FUSED:  # stock's own step: it may err as much again
            bound = bound + 2 * (stock.double() - truth).abs()
        # An inf in a moving average: inf or NaN next, by the order of operations.
        error = (got.double() - truth).abs()
        wrong = (error > bound) | (got.isfinite() != truth.isfinite())
        if bool(wrong.any()):
            i = int(wrong.flatten().double().argmax())
            got, truth, stock, bound = (x.flatten()[i].item() for x in (got, truth, stock, bound))
            raise AssertionError(
                f"{key}[{i}] of {where} is {got}, in float64 {truth} +- {bound}, stock {stock}"
            )

    def _equal(self, got, wanted, where, rtol=0.0):
        assert (got is None) == (wanted is None), f"{where} is {got}, not {wanted}"
        if got is not None:
            torch.testing.assert_close(
                got.to_dense().to(wanted.dtype), wanted, rtol=rtol, atol=0, equal_nan=True,
                msg=lambda text: f"{where}\n{text}",
            )  # fmt: skip

    def _masters(self):
        """The wrapper's float32 copies, by number."""
        return self.wrapper._rule.export_masters()

    def _same_norms(self, norms):
        """Of the last window with a gradient, if the model knows it."""
        if self.model.norms and self.model.updated and self.model.norm:
            wanted = {id(self.params[self._number(p)]): norm for p, norm in self.model.norms.items()}
            assert {id(p) for p in norms} == wanted.keys()
            assert all(same_number(float(n), wanted[id(p)], 1e-6) for p, n in norms.items())

    def _number(self, twin):
        return next(i for i, t in enumerate(self.twins) if t is twin)

    def _take_over(self):
        masters = self._masters()
        with torch.no_grad():
            for i, (param, twin) in enumerate(zip(self.params, self.twins, strict=True)):
                twin.copy_(param if twin.dtype == param.dtype else masters.get(i, twin))
                for key, value in self.model.optimizer.state.get(twin, {}).items():
                    if torch.is_tensor(value):
                        value.copy_(self.wrapper.state[param][key])


def drive(optimizer: str, backend: str, take: str, examples: int, steps: int = 25) -> None:
    """Runs the machine."""
    reasons = dispatch.reasons_against(backend, torch.device("cpu"))
    if reasons:
        pytest.skip("; ".join(reasons))
    torch.set_num_threads(1)  # small tensors; the fixture in conftest puts it back
    name = f"Machine_{optimizer}_{backend}_{take}"
    cls = type(name, (Machine,), {"optimizer_name": optimizer, "backend": backend, "take": take})
    run_state_machine_as_test(cls, settings=fuzzing(examples, stateful_step_count=steps))


def fuzzing(examples: int, **more) -> settings:
    """Settings: the same examples every time in CI; more of them with FASTACCUM_FUZZ."""
    return settings(
        max_examples=max(1, round(examples * MULTIPLE)),
        deadline=None,
        derandomize=os.environ.get("CI", "") not in ("", "0", "false"),
        suppress_health_check=list(HealthCheck),
        print_blob=True,
        **more,
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("take", ["step", "backward"])
@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_any_calls_do_what_the_contract_says(optimizer, backend, take):
    drive(optimizer, backend, take, examples=6 if backend == "native" else 3)


@pytest.mark.quick
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("optimizer", "take"), [("sgd", "step"), ("adam", "backward")])
def test_any_calls_in_short(optimizer, take):
    backend = "reference" if dispatch.native_module()[0] is None else "native"
    drive(optimizer, backend, take, examples=4)


# ------------------------------------------------------------------------------------------ numbers

SIZES = st.one_of(
    st.sampled_from([0, 1, 7, 8, 31, 32, 33, 511, 512, 513, 1025, 8191, 8192, 8193]),
    st.integers(0, 70),
)
SEGMENTS = st.lists(
    st.tuples(
        SIZES,
        st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
        st.sampled_from(["rows", "columns", "channels_last", "gaps", "shifted"]),
    ),
    min_size=1,
    max_size=12,
)


def segment(n: int, dtype: torch.dtype, order: str) -> torch.nn.Parameter:
    """About n zeros in one of several memory orders."""
    data = {
        "rows": lambda: torch.zeros(n, dtype=dtype),
        "columns": lambda: torch.zeros(3, -(-n // 3), dtype=dtype).t(),
        "channels_last": lambda: torch.zeros(2, 3, -(-n // 6), 1, dtype=dtype).to(
            memory_format=torch.channels_last
        ),
        "gaps": lambda: torch.zeros(n, 2, dtype=dtype)[:, 0],
        "shifted": lambda: torch.zeros(n + 1, dtype=dtype)[1:],
    }[order]()
    return torch.nn.Parameter(data)


@settings(fuzzing(12))
@given(
    segments=SEGMENTS,
    windows=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=2),
    kind=st.sampled_from([None, "weight", "count"]),
    take=st.sampled_from(["step", "backward"]),
    backend=st.sampled_from([n for n in ("native", "reference") if not dispatch.reasons_against(
        n, torch.device("cpu"))]),
    norm_type=st.sampled_from([2.0, 1.0, math.inf, 2.5]),
    max_norm=st.sampled_from([None, 0.1, 1e6]),
    missing=st.frozensets(st.tuples(st.integers(0, 11), st.integers(0, 4)), max_size=6),
    seed=seeds,
)  # fmt: skip
def test_any_layout_is_near_float64(
    segments, windows, kind, take, backend, norm_type, max_norm, missing, seed
):
    """From zeros, SGD with lr=1 writes minus the gradient: it is compared with float64."""
    params = [segment(*s) for s in segments]
    optimizer = FusedAccumulator(
        torch.optim.SGD(params, lr=1.0), 9, take=take, backend=backend, norm_type=norm_type,
        max_norm=max_norm,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    for window in windows:
        with torch.no_grad():
            for param in params:
                param.zero_()
        sums = [torch.zeros(p.shape, dtype=torch.float64) for p in params]
        sizes = [torch.zeros(p.shape, dtype=torch.float64) for p in params]
        seen, total = set(), 0.0
        for k, weight in enumerate(window):
            items = 1 if kind is None else weight
            present = [i for i in range(len(params)) if (i, k) not in missing]
            loss = torch.zeros((), dtype=torch.float64, requires_grad=True) * 0
            for i in present:
                grad = torch.randn(params[i].shape, generator=generator).to(params[i].dtype)
                if kind == "count" and items == 0:
                    grad.zero_()
                factor = items if kind == "weight" else 1.0
                sums[i] += factor * grad.double()
                sizes[i] += factor * grad.double().abs()
                loss = loss + (params[i] * grad).sum().double()
            if items:
                seen.update(present)
            optimizer.backward(loss, **({kind: items} if kind else {}))
            optimizer.step()
            total += items if present or kind else 0
        assert optimizer.flush()
        assert optimizer.stepped == bool(total and seen)
        if not total:
            assert all(not p.any() for p in params)
            continue
        finished = [total_i / total for total_i in sums]
        values = torch.cat([finished[i].flatten() for i in range(len(params)) if i in seen] or
                           [torch.zeros(1).double()])  # fmt: skip
        norm = float(torch.linalg.vector_norm(values, norm_type)) if values.numel() else 0.0
        # Each add rounds once, relative to what has been added up.
        roundings = (len(window) + 4) * 2.0**-24
        error = float(torch.linalg.vector_norm(torch.cat([s.flatten() for s in sizes]), 1)) / total
        assert abs(float(optimizer.norm) - norm) <= roundings * error + 2**-22 * norm
        clip = 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
        clip_error = roundings * (1 + (error / norm if norm else 0.0)) if max_norm else 0.0
        for i, param in enumerate(params):
            wanted = -clip * finished[i]
            rounding = (len(window) + 4) * torch.finfo(
                torch.float64 if param.dtype == torch.float64 else torch.float32
            ).eps
            bound = rounding * sizes[i] / total + torch.finfo(param.dtype).eps * wanted.abs()
            bound += clip_error * wanted.abs() + (2**-24 if param.dtype == torch.float16 else 0.0)
            off = (param.detach().double() - wanted).abs() - bound
            assert not (off > 0).any(), f"{segments[i]}: off by {float(off.max())} beyond the bound"
