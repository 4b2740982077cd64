"""The library made wrong on purpose, once for each case from the field, to see that the case's test notices.

``python -m tests.wrong_variants [--right] [ID...]`` runs, for each variant, its tests against the wrong
library in a process of its own, and prints as JSON what became of them; with ``--right``, against the library
as it is. ``tests/test_field_cases.py`` judges.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import json
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from fastaccum import (
    advice,
    arguments,
    clip,
    dispatch,
    gradients,
    layout,
    outcome,
    pending,
    reference,
    roster,
    scaling,
    slots,
    updates,
    window,
)
from fastaccum.accumulator import FusedAccumulator
from tests import cases

ROOT = Path(__file__).resolve().parent.parent
Patch = pytest.MonkeyPatch


class Variant(NamedTuple):
    """One wrong library.

    Attributes:
        tests: the tests that must fail: ``file.py::function``; of a parametrised one, at least one.
        make: makes the library wrong.
        raises: what the tests may fail with.
    """

    tests: list[str]
    make: Callable[[Patch], None]
    raises: tuple[str, ...] = ("AssertionError", "Failed")


VARIANTS: dict[str, Variant] = {}


def wrong(name: str, *tests: str, raises: tuple[str, ...] = ("AssertionError", "Failed")) -> Any:
    """Registers a variant, ``<id of the case> <what is wrong>``, for ``file::test`` names."""

    def register(make: Callable[[Patch], None]) -> Callable[[Patch], None]:
        VARIANTS[name] = Variant([f"tests/test_{test}" for test in tests], make, raises)
        return make

    return register


def around(patch: Patch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Replaces a function by ``change(original, *args, **kwargs)``."""
    original = getattr(owner, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        return change(original, *args, **kwargs)

    patch.setattr(owner, name, changed)


# ------------------------------------------------------------------------------------------ normalisation


@wrong("N01 a mean of means", "weights.py::test_n01_micro_batches_count_by_their_items")
def _(patch: Patch) -> None:
    patch.setattr(FusedAccumulator, "_given", lambda self, weight, count: None)


@wrong("N02 divided once more", "weights.py::test_n02_exactly_one_normalisation")
def _(patch: Patch) -> None:
    patch.setattr(FusedAccumulator, "_divide_by", lambda self, unclosed=0.0: self._window.total or 1.0)


@wrong("N03 not divided", "weights.py::test_n03_the_mean_does_not_depend_on_the_number_of_micro_batches")
def _(patch: Patch) -> None:
    patch.setattr(FusedAccumulator, "_divide_by", lambda self, unclosed=0.0: 1.0)


@wrong(
    "N05 divided by the nominal number",
    "accumulator.py::test_n05_y01_a_short_last_window_is_divided_by_what_it_holds",
)
def _(patch: Patch) -> None:
    patch.setattr(FusedAccumulator, "_divide_by", lambda self, unclosed=0.0: float(self.accumulation_steps))


# ----------------------------------------------------------------------------------------------- clipping


@wrong(
    "C01 each micro-batch is clipped", "clipping.py::test_c01_the_window_is_clipped_and_not_the_micro_batch"
)
def _(patch: Patch) -> None:
    def change(add: Any, self: Any, entries: Any, *args: Any, **kwargs: Any) -> None:
        norm = torch.linalg.vector_norm(torch.stack([grad.norm() for _, grad in entries]))
        factor = min(1.0, self.max_norm / (norm.item() + 1e-6))
        add(self, [(slot, grad * factor) for slot, grad in entries], *args, **kwargs)

    around(patch, FusedAccumulator, "_add", change)


@wrong(
    "C03 inf and NaN go through", "clipping.py::test_c03_a_window_that_is_not_finite_leaves_everything_alone"
)
def _(patch: Patch) -> None:
    def change(finish: Any, *args: Any) -> None:
        assert args[19] is True  # skip_nonfinite
        finish(*args[:19], False, *args[20:])

    on_reference(patch)
    around(patch, reference, "finish_", change)


@wrong(
    "C03 nothing is raised",
    "clip_functions.py::test_c03_error_if_nonfinite_raises_before_a_gradient_is_touched",
)
def _(patch: Patch) -> None:
    patch.setattr(clip, "_require_finite", lambda norm, norm_type: None)


@wrong(
    "C04 an empty list crashes",
    "clip_functions.py::test_c04_nothing_to_clip_is_a_norm_of_0",
    raises=("IndexError",),
)
def _(patch: Patch) -> None:
    around(patch, clip, "_total_norm", lambda f, tensors, *a: (tensors[0].device, f(tensors, *a))[1])


@wrong("C04 only the first device counts", "clip_functions.py::test_c04_several_devices_are_refused")
def _(patch: Patch) -> None:
    def change(total_norm: Any, tensors: Any, *args: Any) -> Any:
        return total_norm([t for t in tensors if t.device == tensors[0].device], *args)

    around(patch, clip, "_total_norm", change)


@wrong(
    "C04 only the first tensor counts",
    "clip_functions.py::test_c04_one_tensor_a_generator_and_missing_gradients",
)
def _(patch: Patch) -> None:
    around(patch, clip, "_as_list", lambda as_list, *args: as_list(*args)[:1])


@wrong(
    "C06 -1 stands for a norm that is not finite",
    "clipping.py::test_c06_the_clip_factor_is_between_0_and_1_or_the_window_is_skipped",
)
def _(patch: Patch) -> None:
    def change(finish: Any, norm: Any, group_norms: Any, factor: Any, skip: Any, *args: Any) -> None:
        finish(norm, group_norms, factor, skip, *args)
        if not norm.isfinite():
            factor.fill_(-1.0)
            skip.zero_()

    on_reference(patch)
    around(patch, reference, "finish_", change)


@wrong(
    "C06 a norm of 0 is no norm",
    "clipping.py::test_c06_a_zero_gradient_is_an_ordinary_window",
    "clip_functions.py::test_c06_zero_gradients",
)
def _(patch: Patch) -> None:
    def change(finish: Any, norm: Any, group_norms: Any, factor: Any, skip: Any, *args: Any) -> None:
        finish(norm, group_norms, factor, skip, *args)
        if not norm:
            group_norms.fill_(float("nan"))
            norm.fill_(float("nan"))

    on_reference(patch)
    around(patch, reference, "finish_", change)


@wrong("C08 a shared parameter counts twice", "clipping.py::test_c08_a_shared_parameter_counts_once")
def _(patch: Patch) -> None:
    def listed(param_groups: Any) -> Any:
        return [(p, number) for number, group in enumerate(param_groups) for p in group["params"]]

    patch.setattr(roster, "unique_params", listed)


@wrong(
    "C08 listed twice, counted twice",
    "clip_functions.py::test_c08_one_parameter_listed_twice_counts_and_shrinks_once",
)
def _(patch: Patch) -> None:
    numbers = itertools.count()
    patch.setattr(clip, "id", lambda param: next(numbers), raising=False)


@wrong("C09 values that are not coalesced", "clipping.py::test_c09_sparse_gradients_are_coalesced")
def _(patch: Patch) -> None:
    def change(taken: Any, self: Any, grad: Any) -> Any:
        if grad.is_sparse:
            dense = torch.zeros(grad.shape)
            dense[grad._indices()[0]] = grad._values()  # the last one wins
            grad = dense
        return taken(self, grad)

    around(patch, slots.Slot, "taken", change)


# -------------------------------------------------------------------------------------------------- dtype


def on_reference(patch: Patch) -> None:
    """The plain PyTorch ops, wherever the backend is not named."""
    patch.setenv("FASTACCUM_BACKEND", "reference")
    dispatch.load.cache_clear()


def squares_in(patch: Patch, dtype: torch.dtype) -> None:
    """Squares and their sums in a narrow dtype."""

    def contribution(x: Any, norm_type: float, scale: float) -> Any:
        return (x.to(dtype).abs() ** min(norm_type, 2.0)).double()

    on_reference(patch)
    patch.setattr(reference, "_contribution", contribution)


@wrong(
    "D01 squares in float16",
    "clipping.py::test_d01_sixteen_bit_norms_are_float32",
    "clip_functions.py::test_d01_sums_of_squares_do_not_overflow_in_sixteen_bits",
)
def _(patch: Patch) -> None:
    squares_in(patch, torch.float16)


@wrong(
    "D02 added in the gradients' dtype", "accumulator.py::test_d02_sixteen_bit_gradients_are_added_in_float32"
)
def _(patch: Patch) -> None:
    patch.setattr(slots, "accumulation_dtype", lambda dtype, asked: dtype)


@wrong(
    "U01 squares in float32",
    "clipping.py::test_u01_the_norm_is_finite_whenever_it_fits_float32",
    "clip_functions.py::test_u01_a_float32_norm_neither_overflows_nor_underflows",
)
def _(patch: Patch) -> None:
    squares_in(patch, torch.float32)


# ------------------------------------------------------------------------------------------ memory layout


@wrong("L01 a gradient may vanish", "accumulator.py::test_l01_a_gradient_that_vanished_raises")
def _(patch: Patch) -> None:
    patch.setattr(pending.Pending, "check_arrived", lambda self, slots, grads, apart: None)


@wrong(
    "L01 what arrived counts, not what lies there", "accumulator.py::test_l01_a_replaced_gradient_is_taken"
)
def _(patch: Patch) -> None:
    def change(entries: Any, self: Any, slots: Any, grads: Any, **owned: Any) -> Any:
        noted = set(map(id, self._pending.arrivals.noted))
        there = [id(slot.param) in noted for slot in slots]
        return entries(self, *(list(itertools.compress(these, there)) for these in (slots, grads)), **owned)

    around(patch, FusedAccumulator, "_entries", change)


@wrong(
    "L03 gradients as they lie in memory",
    "parameters.py::test_l03_the_case_from_the_field",
)
def _(patch: Patch) -> None:
    def raw(self: Any, grad: Any) -> Any:
        room = grad.untyped_storage().nbytes() // grad.element_size() - grad.storage_offset()
        if room < grad.numel():
            return grad.reshape(-1)
        return grad.as_strided((grad.numel(),), (1,))

    patch.setattr(slots.Slot, "taken", raw)


@wrong("L03 gaps are walked over", "parameters.py::test_l03_every_layout_trains_as_the_loop_does")
def _(patch: Patch) -> None:
    patch.setattr(slots, "_is_dense", lambda param: True)


@wrong("L03 norms of what lies in memory", "clip_functions.py::test_l03_layouts_and_overlaps")
def _(patch: Patch) -> None:
    def raw(tensor: Any) -> Any:
        room = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
        return tensor.detach().as_strided((min(room, tensor.numel()),), (1,))

    patch.setattr(clip, "_dense", raw)


@wrong(
    "L06 vectors start where they are aligned",
    "parameters.py::test_l06_neighbours_of_a_misaligned_parameter_are_not_touched",
    "clip_functions.py::test_l06_neighbours_are_not_touched",
)
def _(patch: Patch) -> None:
    def aligned(tensor: Any) -> Any:
        return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset() // 4 * 4)

    on_reference(patch)
    patch.setattr(reference, "memory_order", aligned)


@wrong("L07 a table of 110 places", "parameters.py::test_l07_any_number_of_tensors")
def _(patch: Patch) -> None:
    on_reference(patch)
    around(patch, reference, "sgd_", lambda sgd, params, *rest: sgd(params[:110], *rest))


@wrong(
    "L07 an empty tensor takes its neighbour's place",
    "parameters.py::test_u07_l07_empty_parameters_are_no_ops",
)
def _(patch: Patch) -> None:
    def change(gather: Any, *args: Any) -> None:
        gather(*args)
        segments, fresh, index = args[3:6]
        for i, k in enumerate(index.tolist()):
            if not fresh[i].numel() and k + 1 < len(segments):
                args[0][segments[k + 1, 0]] += 1.0

    on_reference(patch)
    around(patch, reference, "gather_", change)


@wrong(
    "L08 offsets of 32 bits",
    "costs.py::test_l08_offsets_beyond_32_bits",
    "costs.py::test_l08_plans_hold_64_bit_tables",
)
def _(patch: Patch) -> None:
    around(patch, layout, "round_up", lambda up, n, multiple: up(n, multiple) % 2**32)


# ---------------------------------------------------------------------------------------------- lifecycle


@wrong(
    "Y01 the last micro-batches are dropped",
    "accumulator.py::test_n05_y01_a_short_last_window_is_divided_by_what_it_holds",
)
def _(patch: Patch) -> None:
    patch.setattr(FusedAccumulator, "flush", lambda self: bool(self.discard()))


@wrong("Y01 nobody is warned", "accumulator.py::test_y01_a_loop_with_its_own_count_is_warned_once")
def _(patch: Patch) -> None:
    patch.setattr(advice.Advice, "give", lambda self, key, **values: None)


@wrong(
    "Y03 every micro-batch is a step",
    "hooks.py::test_y03_a_scheduler_moves_once_per_update",
    "schedulers.py::test_y03_with_a_grad_scaler_a_skipped_window_moves_nothing",
)
def _(patch: Patch) -> None:
    patch.setattr(FusedAccumulator, "stepped", property(lambda self: True))


@wrong("Y03 a skipped update is counted", "schedulers.py::test_y03_counters_move_once_per_applied_update")
def _(patch: Patch) -> None:
    patch.setattr(FusedAccumulator, "stepped", property(lambda self: self.updated))


@wrong("Y04 gradients are not saved", "state.py::test_y04_saved_inside_a_window_training_goes_on_bit_for_bit")
def _(patch: Patch) -> None:
    patch.setattr(window.Window, "export", lambda self: (False, {}))


@wrong(
    "Y04 a closed window is saved as an open one",
    "state.py::test_y04_a_checkpoint_of_a_closed_window_starts_at_0",
)
def _(patch: Patch) -> None:
    def change(state_dict: Any, self: Any) -> Any:
        return {**state_dict(self), "micro_step": self.accumulation_steps, "accumulation_steps": 4}

    around(patch, FusedAccumulator, "window_state_dict", change)


@wrong(
    "Y05 groups of its own",
    "state.py::test_y05_groups_are_the_inner_optimizers_at_all_times",
    "schedulers.py::test_y05_schedulers_live_on_after_load_state_dict",
)
def _(patch: Patch) -> None:
    def own(self: Any) -> Any:
        return self.__dict__.setdefault("_own_groups", self._inner.param_groups)

    patch.setattr(FusedAccumulator, "param_groups", property(own, lambda self, groups: None))


@wrong(
    "Y07 a copy is the original",
    "hooks.py::test_y07_a_copy_is_independent_and_goes_on_the_same",
    "schedulers.py::test_y07_a_copy_of_optimizer_and_scheduler_goes_on_alone",
)
def _(patch: Patch) -> None:
    patch.setattr(FusedAccumulator, "__deepcopy__", lambda self, memo: self, raising=False)


@wrong("Y07 a copy keeps the step hooks", "hooks.py::test_y07_a_copy_drops_step_hooks_as_stock_does")
def _(patch: Patch) -> None:
    def get(get: Any, self: Any) -> Any:
        return {**get(self), "hooks": self._optimizer_step_post_hooks}

    def put(put: Any, self: Any, state: Any) -> None:
        put(self, state)
        self._optimizer_step_post_hooks.update(state["hooks"])

    around(patch, FusedAccumulator, "__getstate__", get)
    around(patch, FusedAccumulator, "__setstate__", put)


def zeros_for_missing(patch: Patch) -> None:
    """A parameter without a gradient gets one of zeros."""

    def change(close: Any, self: Any, *args: Any) -> Any:
        if self.micro_step + 1 == self.accumulation_steps:
            for param in self._roster.params:
                if param.grad is None and self._window.gradient(self._roster.slot_of(param), 1.0) is None:
                    param.grad = torch.zeros_like(param)
        return close(self, *args)

    around(patch, FusedAccumulator, "_close_micro_batch", change)


@wrong(
    "Y08 what is left of the last window",
    "parameters.py::test_y08_a_parameter_without_a_gradient_is_left_alone",
)
def _(patch: Patch) -> None:
    def change(reset: Any, self: Any) -> None:
        present = [buffer.present.clone() for buffer in self.buffers]
        reset(self)
        for buffer, before in zip(self.buffers, present, strict=True):
            buffer.present.copy_(before)
            buffer.data.zero_()
            for view, here in zip(buffer.views, before.tolist(), strict=True):
                view.fill_(1.0 if here else 0.0)
            self._in_buffers = True

    around(patch, window.Window, "reset", change)


@wrong(
    "A06 no gradient is a gradient of 0", "parameters.py::test_a06_no_gradient_means_no_decay_and_no_momentum"
)
def _(patch: Patch) -> None:
    zeros_for_missing(patch)


# -------------------------------------------------------------------------------------------- distributed


class Alone(torch.nn.Module):
    """A model that says it is DDP's and reduces nothing."""

    def __init__(self, module: torch.nn.Module, **options: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module(*args)

    def no_sync(self) -> Any:
        return contextlib.nullcontext()


def in_ranks(rank: int, case: str, folder: str) -> None:
    """One rank of tests/test_distributed.py, wrong, with the checks of one case."""
    from tests import test_distributed as module

    module.CHECKS = {name: check for name, check in module.CHECKS.items() if name.startswith(case)}
    if case == "l04":  # what was kept still lies in the buckets
        gradients.own = lambda grads: None
        FusedAccumulator._may_keep = lambda self: self._window.empty
    else:
        module.DDP = Alone
    module.work(rank, folder)


def spawning(case: str) -> Callable[[Patch], None]:
    """Lets the ranks run :func:`in_ranks`."""

    def make(patch: Patch) -> None:
        def spawn(work: Any, args: Any, nprocs: int) -> None:
            torch.multiprocessing.start_processes(in_ranks, (case, *args), nprocs, start_method="fork")

        patch.setattr(torch.multiprocessing, "spawn", spawn)

    return make


wrong(
    "X01 nothing is synchronised",
    "distributed.py::test_x01_synchronised_on_the_last_micro_batch",
    "distributed.py::test_x01_a_short_last_window",
)(spawning("x01"))
wrong("X03 nothing is synchronised", "distributed.py::test_x03_a_static_graph_gives_the_right_gradients")(
    spawning("x03")
)
wrong("L04 views of buckets are kept", "distributed.py::test_l04_gradients_that_are_views_of_buckets")(
    spawning("l04")
)


@wrong("X05 no device is looked at", "mixed_precision.py::test_x05_a_scalers_number_without_data_is_refused")
def _(patch: Patch) -> None:
    patch.setattr(scaling, "_beside", lambda scalar, name, device: scalar)


# ----------------------------------------------------------------------------------------------- numerics


@wrong("U03 found_inf is not heard", "mixed_precision.py::test_u03_found_inf_alone_stops_the_update")
def _(patch: Patch) -> None:
    patch.setattr(outcome.Outcome, "tell", lambda self, found_inf: None)


@wrong("U05 unscaled once more", "mixed_precision.py::test_u05_the_gradient_is_unscaled_once")
def _(patch: Patch) -> None:
    def change(of_micro_batch: Any, self: Any) -> Any:
        scale, found = of_micro_batch(self)
        return (torch.tensor(8.0) if scale is None and found is not None else scale), found

    around(patch, scaling.Scaling, "of_micro_batch", change)


@wrong("U06 one decay for both", "training.py::test_u06_decay_is_adams_or_adamws")
def _(patch: Patch) -> None:
    around(
        patch,
        updates.AdamRule,
        "_row",
        lambda row, self, group: row(self, {**group, "decoupled_weight_decay": True}),
    )


@wrong(
    "U07 an empty tensor at the end stops the launch",
    "parameters.py::test_u07_l07_empty_parameters_are_no_ops",
)
def _(patch: Patch) -> None:
    on_reference(patch)
    for name in ("sgd_", "adam_"):
        around(
            patch, reference, name, lambda f, params, *rest: f(params if params[-1].numel() else [], *rest)
        )


# -------------------------------------------------------------------------------------------- performance


@wrong(
    "P01 a call per tensor",
    "costs.py::test_p01_calls_per_window_do_not_grow_with_the_number_of_tensors",
    "costs.py::test_p01_the_functions_detach_each_tensor_and_no_more",
)
def _(patch: Patch) -> None:
    on_reference(patch)


@wrong(
    "P02 all graphs are kept for the window's end",
    "costs.py::test_p02_memory_does_not_grow_with_the_micro_batches",
)
def _(patch: Patch) -> None:
    losses: list[Any] = []

    def change(backward: Any, self: Any, loss: Any, **kwargs: Any) -> None:
        backward(self, loss, retain_graph=True, **kwargs)
        losses.append(loss)

    around(patch, FusedAccumulator, "backward", change)


# ---------------------------------------------------------------------------------------------------- api


@wrong(
    "A01 anything goes",
    "arguments.py::test_a01_accumulation_steps",
    "arguments.py::test_a01_limits",
    "clip_functions.py::test_a01_a_wrong_max_norm",
)
def _(patch: Patch) -> None:
    patch.setattr(arguments, "positive", lambda value, argument, advice: value)
    for name in ("accumulation_steps", "max_norm", "norm_type"):
        patch.setattr(arguments, name, lambda value, argument="": value)


@wrong(
    "A02 defaults of its own",
    "hooks.py::test_a02_it_is_an_optimizer",
    "hooks.py::test_a02_schedulers_run_without_warnings_and_their_values_count",
    "schedulers.py::test_a02_every_knob_of_two_groups_turns_as_in_stock",
    raises=("AssertionError", "KeyError", "ValueError"),
)
def _(patch: Patch) -> None:
    patch.setattr(FusedAccumulator, "defaults", property(lambda self: {}))


@wrong("A02 hooks fire in every micro-batch", "hooks.py::test_a02_step_hooks_fire_once_per_window_in_order")
def _(patch: Patch) -> None:
    def change(close: Any, self: Any, *args: Any) -> None:
        close(self, *args)
        if self.micro_step:
            self._run_hooks("post")

    around(patch, FusedAccumulator, "_close_micro_batch", change)


# -------------------------------------------------------------------------------------------------- build


def setup_with(change: Callable[[dict[str, Any]], None]) -> Callable[[Patch], None]:
    """Another setup.py for the tests that call its functions."""

    def make(patch: Patch) -> None:
        def run_path(original: Any, *args: Any) -> Any:
            functions = original(*args)
            change(functions)
            return functions

        around(patch, runpy, "run_path", run_path)

    return make


wrong(
    "B01 any toolkit will do",
    "build_cuda.py::test_b01_unusable_toolkit_is_left_out_with_its_reason",
    "build_cuda.py::test_b01_missing_toolkit_is_said",
)(setup_with(lambda functions: functions.update(find_toolkit=lambda torch: (object(), ""))))


def edited(old: str, new: str) -> Callable[[Patch], None]:
    """Changes setup.py in the copy of the tree that the tests build."""

    def make(patch: Patch) -> None:
        def change(run: Any, command: Any, **kwargs: Any) -> Any:
            script = Path(kwargs.get("cwd") or ".") / "setup.py"
            if "cwd" in kwargs and script.exists():
                text = script.read_text()
                assert old in text
                script.write_text(text.replace(old, new, 1))
            return run(command, **kwargs)

        around(patch, subprocess, "run", change)

    return make


wrong("B01 the reason is lost", "build_cuda.py::test_b01_library_without_kernels_tells_why")(
    edited('"CUDA_NOTE": no_cuda', '"CUDA_NOTE": ""')
)
wrong(
    "B02 setup.py imports torch",
    "build.py::test_b02_sdist_needs_setuptools_only_and_holds_every_source",
    "build.py::test_b02_metadata_needs_setuptools_only",
    "build.py::test_b02_missing_torch_headers_fail_and_say_what_to_do",
)(edited("import json\n", "import json\nimport torch\n"))


@wrong(
    "B04 the error of the import goes on",
    "build.py::test_b04_a_library_that_cannot_be_loaded_is_told_of_and_not_used",
)
def _(patch: Patch) -> None:
    def change(copytree: Any, source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
        copytree(source, target, *args, **kwargs)
        file = Path(target) / "dispatch.py"
        if file.exists():
            text = file.read_text()
            assert "except ImportError as error:" in text
            file.write_text(text.replace("except ImportError as error:", "except KeyError as error:", 1))

    around(patch, shutil, "copytree", change)


@wrong("B05 AVX without asking", "build.py::test_b05_wide_instructions_stay_in_their_level")
def _(patch: Patch) -> None:
    folder = Path(tempfile.mkdtemp())
    (folder / "wide.cpp").write_text("void twice(float* x) { for (int i = 0; i < 64; ++i) x[i] += x[i]; }\n")
    for name in ("libfastaccum_core.so", "_C" + sysconfig.get_config_var("EXT_SUFFIX")):
        subprocess.run(
            ["g++", "-O3", "-mavx2", "-shared", "-fPIC", "-o", folder / name, folder / "wide.cpp"], check=True
        )

    def change(find_spec: Any, name: str, *args: Any) -> Any:
        return SimpleNamespace(origin=str(folder / "x")) if name == "fastaccum" else find_spec(name, *args)

    around(patch, importlib.util, "find_spec", change)


@wrong("B05 a level rounds otherwise", "isa.py::test_b05_levels_agree_with_the_baseline")
def _(patch: Patch) -> None:
    def raw(self: Any) -> Any:
        op = getattr(torch.ops.fastaccum, self.name).default
        module, _ = dispatch.native_module()

        def call(*args: Any, **kwargs: Any) -> None:
            op(*args, **kwargs)
            if module.isa() != "baseline":
                for tensor in itertools.chain.from_iterable(a if isinstance(a, list) else [a] for a in args):
                    if torch.is_tensor(tensor) and tensor.is_floating_point():
                        tensor.mul_(1.01)

        call._schema = op._schema  # type: ignore[attr-defined]
        return call

    patch.setattr(cases.OpCase, "raw", property(raw))


@wrong(
    "B05 an unknown level is taken",
    "isa.py::test_b05_a_level_that_is_not_there_is_refused_with_reasons",
)
def _(patch: Patch) -> None:
    patch.setattr(dispatch, "reasons_against", lambda backend, device: [])


# ------------------------------------------------------------------------------------------------ running


class Recorder:
    """A pytest plugin: notes what each test function came to, and goes on to the next at a failure.

    Attributes:
        outcomes: ``file::function`` -> ``passed``, ``skipped``, ``xfail`` or its exception's name.
    """

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        # Patches reach the plain PyTorch ops, not native code.
        items[:] = [
            i for i in items if "callspec" not in vars(i) or i.callspec.params.get("backend") != "native"
        ]

    def pytest_runtest_protocol(self, item: Any) -> bool | None:
        known = self.outcomes.get(function_of(item.nodeid), "passed")
        return None if known in UNDECIDED else True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        report = yield
        name = function_of(item.nodeid)
        if hasattr(report, "wasxfail"):
            self.outcomes.setdefault(name, "xfail")
        elif report.failed and call.excinfo is not None:
            self.outcomes[name] = call.excinfo.typename
        elif report.when == "call" or report.skipped:
            self.outcomes.setdefault(name, report.outcome)
        return report


UNDECIDED = ("passed", "skipped", "xfail")


def function_of(nodeid: str) -> str:
    """A test's name without its parameters."""
    return nodeid.partition("[")[0]


def run(tests: list[str]) -> dict[str, str]:
    """Runs tests in this process."""
    recorder = Recorder()
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        status = pytest.main(
            ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(ROOT), *tests],
            plugins=[recorder],
        )
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(output.getvalue())
    return recorder.outcomes


def start(variant: Variant, is_wrong: bool) -> tuple[int, int]:
    """Runs a variant's tests in a process of its own; torch is imported once.

    Returns:
        its id, and the pipe with its answer.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    try:
        if is_wrong:
            variant.make(pytest.MonkeyPatch())
        result = run(variant.tests)
    except BaseException:
        result = {"error": traceback.format_exc()}
    with os.fdopen(writing, "w") as stream:
        json.dump(result, stream)
    os._exit(0)


def finish(child: int, reading: int) -> dict[str, str]:
    """Its answer."""
    with os.fdopen(reading) as stream:
        text = stream.read()
    os.waitpid(child, 0)
    return json.loads(text)


def main() -> None:
    """All variants, or those of the given cases."""
    os.chdir(ROOT)
    torch.set_num_threads(1)  # threads do not outlive a fork
    importlib.import_module("torch._dynamo")  # as the first optimizer of a process does
    asked = [word for word in sys.argv[1:] if not word.startswith("-")]
    chosen = {n: v for n, v in VARIANTS.items() if not asked or n.split()[0] in asked}
    run(
        ["--collect-only", *{test.partition("::")[0] for v in chosen.values() for test in v.tests}]
    )  # imports them
    results: dict[str, dict[str, str]] = {}
    waiting: list[tuple[str, int, int]] = []
    for name, variant in chosen.items():
        waiting.append((name, *start(variant, "--right" not in sys.argv)))
        while len(waiting) >= AT_A_TIME or (waiting and name == list(chosen)[-1]):
            done, *process = waiting.pop(0)
            results[done] = finish(*process)
    print(json.dumps(results))


AT_A_TIME = 2

if __name__ == "__main__":
    main()
