"""BatchNorm under gradient accumulation: it sees micro-batches, so convert it, or know what it misses.

Accumulating gradients makes the batch of the *update* large; a BatchNorm still normalises each micro-batch
by that micro-batch's own mean and variance.
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from fastaccum import arguments
from fastaccum.buffers import Buffers

TO = ("group", "sync", "frozen")


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """A model's BatchNorm layers by name, each once.

    Raises:
        TypeError: it is not a module.
        ValueError: it has none, or one that is lazy and has no channels yet.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    found = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    if not found:
        raise ValueError(f"this {type(model).__name__} has no BatchNorm layer: there is nothing to do")
    for name, module in found.items():
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
            raise ValueError(f"{name or 'the model'} is a lazy BatchNorm: run one forward pass first")
    return found


# ------------------------------------------------------------------------------------- conversion


# Layers that run one of these do nothing besides.
_OWN_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward)


class FrozenBatchNorm(nn.Module):
    """A BatchNorm that always normalises by its running statistics and never changes them.

    ``y = (x - running_mean) / sqrt(running_var + eps) * weight + bias``, per channel (dimension 1). The
    state's keys are BatchNorm's. ``weight`` and ``bias`` are trained on if they require gradients.

    Args:
        source: the BatchNorm whose parameters and statistics it takes over, the very same tensors.
    """

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None

    def __init__(self, source: _BatchNorm) -> None:
        super().__init__()
        self.num_features, self.eps = source.num_features, source.eps
        self.register_parameter("weight", source.weight)
        self.register_parameter("bias", source.bias)
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(source, name))
        self.register_load_state_dict_pre_hook(_without_count)
        self.train(source.training)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [rows, channels, ...] to the same shape."""
        # training=False: nothing is measured, in training mode neither.
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps
        )

    def extra_repr(self) -> str:
        """Channels and eps."""
        return f"{self.num_features}, eps={self.eps}"


def _without_count(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """A BatchNorm's state from before torch 0.4.1 lacks the number of batches, which nothing here needs."""
    if getattr(module, "num_batches_tracked", None) is not None:
        state.setdefault(f"{prefix}num_batches_tracked", torch.tensor(0))


def convert_batch_norm(
    model: nn.Module,
    to: str,
    *,
    groups: int | None = None,
    channels_per_group: int | None = None,
    process_group: Any = None,
) -> nn.Module:
    """Replaces every BatchNorm layer of a model by one that suits small micro-batches.

    * ``"group"``: ``GroupNorm`` (Wu & He 2018) normalises each row by itself, so accumulation changes
      nothing. There are at most ``groups`` groups: the largest number that divides the channels and leaves a
      group 2 channels or more, 8 or more in place of a BatchNorm1d, whose rows may have no other dimension.
      Running statistics have no meaning there and are dropped; the model must be trained again.
    * ``"sync"``: ``SyncBatchNorm`` through torch's own converter: batches of all ranks together, statistics
      kept. It widens a micro-batch by the number of ranks; it does not join micro-batches.
    * ``"frozen"``: :class:`FrozenBatchNorm`, for a pretrained model: running statistics are used, in training
      too, and stay as they are.

    The new layers hold the very same ``weight`` and ``bias`` parameters (an optimizer that has them keeps
    them), eps and training mode. Hooks of the old layers are not carried over.

    Args:
        model: changed in place, unless it is itself a BatchNorm.
        to: ``"group"``, ``"sync"`` or ``"frozen"``.
        groups: with ``"group"``, the most groups that a layer gets, 32 by default.
        channels_per_group: with ``"group"``, exactly that many channels in every group instead.
        process_group: with ``"sync"``, the ranks to join; all by default.

    Returns:
        The model; what replaces it if it is itself a BatchNorm.

    Raises:
        TypeError, ValueError: a wrong argument; no BatchNorm, or one that cannot be converted. Nothing has
            changed then.
    """
    layers = batch_norms(model)
    arguments.choice(to, "to", TO)
    for name, layer in layers.items():
        if type(layer).forward not in _OWN_FORWARDS or nn.utils.parametrize.is_parametrized(layer):
            raise ValueError(
                f"{name or 'the model'} is a {type(layer).__name__}, which does more than a BatchNorm "
                "(a forward or a parametrization of its own), and that would be lost: replace it yourself"
            )
    for argument, value in (("groups", groups), ("channels_per_group", channels_per_group)):
        if value is not None:
            arguments.whole(value, argument, 1, "of the channels")
            if to != "group":
                raise ValueError(f"groups of channels ({argument}=) go with to='group', not with to={to!r}")
    groups = 32 if groups is None else groups
    if process_group is not None and to != "sync":
        raise ValueError(f"process_group goes with to='sync', not with to={to!r}")
    if to == "sync":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model, process_group)
    # All new layers are made before the first one is put in its place.
    new: dict[nn.Module, nn.Module] = {}
    for name, layer in layers.items():
        if to == "group":
            new[layer] = _group_norm(layer, _number_of_groups(name, layer, groups, channels_per_group))
        else:
            new[layer] = _frozen(name, layer)
    if to == "frozen":
        _warn_of_no_data(layers)
    if model in new:
        return new[model]
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child in new:
                parent._modules[name] = new[child]
    return model


def _group_norm(layer: _BatchNorm, number: int) -> nn.GroupNorm:
    made = nn.GroupNorm(number, layer.num_features, eps=layer.eps, affine=False)
    made.affine = layer.affine
    made.weight, made.bias = layer.weight, layer.bias
    return made.train(layer.training)


def _number_of_groups(name: str, layer: _BatchNorm, most: int, exactly: int | None) -> int:
    channels = layer.num_features
    if exactly is not None:
        if channels % exactly:
            sizes = [n for n in range(1, channels + 1) if channels % n == 0]
            raise ValueError(
                f"{name or 'the model'} has {channels} channels, which channels_per_group={exactly} does not "
                f"divide: {', '.join(map(str, sizes))} do"
            )
    one_dimensional = isinstance(layer, nn.BatchNorm1d)
    if one_dimensional and 1 in (channels, exactly):
        raise ValueError(
            f"{name or 'the model'} is a BatchNorm1d: a GroupNorm with one channel in a group normalises a "
            "single value there, and is constant. Use more channels_per_group, to='frozen' or to='sync'"
        )
    if exactly is not None:
        return channels // exactly
    least = min(channels, 8 if one_dimensional else 2)
    return max(n for n in range(1, most + 1) if channels % n == 0 and channels // n >= least)


def _frozen(name: str, layer: _BatchNorm) -> FrozenBatchNorm:
    if layer.running_mean is None or layer.running_var is None:
        raise ValueError(
            f"{name or 'the model'} keeps no running statistics (track_running_stats=False): there is "
            "nothing to freeze; use to='group'"
        )
    return FrozenBatchNorm(layer)


def _warn_of_no_data(layers: Mapping[str, Any]) -> None:
    fresh = [
        name
        for name, layer in layers.items()
        if not bool(layer.running_mean.any()) and bool((layer.running_var == 1).all())
    ]
    if fresh:
        warnings.warn(
            f"the running statistics of {fresh[0] or 'the model'} ({len(fresh)} of {len(layers)} BatchNorm "
            "layers) are those of a layer that has seen no data (mean 0, variance 1): load a trained state "
            "before freezing them",
            UserWarning,
            stacklevel=3,
        )


# ---------------------------------------------------------------------------------------- warning


class BatchNormWatch:
    """The hooks of :func:`warn_of_small_batches`; :meth:`remove` takes those that are left away."""

    def __init__(self, layers: Mapping[str, _BatchNorm], minimum: int) -> None:
        self._minimum = minimum
        self._handles = {
            name: layer.register_forward_pre_hook(_Look(self, name), with_kwargs=True)
            for name, layer in layers.items()
        }

    def remove(self) -> None:
        """Ends the watch."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def look(self, name: str, layer: Any, x: Tensor) -> None:
        """Looks at what a layer gets, once."""
        if not layer.training and layer.running_mean is not None:
            return  # it uses its running statistics
        self._handles.pop(name).remove()
        values = x.numel() // layer.num_features * _ranks(layer)
        if values < self._minimum:
            left = len(self._handles)
            self.remove()
            self._warn(name, values, left)

    def _warn(self, name: str, values: int, left: int) -> None:
        error = f"about {100 * math.sqrt(2 / (values - 1)):.0f} %" if values > 1 else "beyond measure"
        warnings.warn(
            f"BatchNorm layer {name or '(the model)'} normalises by {values} values per channel, fewer than "
            f"{self._minimum}: its variance is off by {error} ({left} layers were not looked at any more). "
            "Accumulating gradients does not widen it. fastaccum.convert_batch_norm(model, to='group') "
            "replaces it; fastaccum.virtual_batch_norm_statistics(model, loader) mends what evaluation uses",
            UserWarning,
            stacklevel=_callers_level(),
        )


class _Look:
    """The hook of one layer. In a copy of the model, pickled or not, it does nothing: that is not watched."""

    def __init__(self, watch: BatchNormWatch, name: str) -> None:
        self._watch, self._name = watch, name

    def __call__(self, layer: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._watch.look(self._name, layer, _input(inputs, kwargs))

    def __reduce__(self) -> Any:
        return _looks_away, ()


def _looks_away() -> Callable[..., None]:
    return _look_away


def _look_away(layer: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The hook of a layer that was copied."""


def _input(inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a layer was called with, by position or as ``input=``."""
    return inputs[0] if inputs else kwargs["input"]


def _callers_level() -> int:
    """The ``stacklevel``, for this function's caller, of the line that called the layer."""
    own = (__file__, os.path.dirname(torch.__file__) + os.sep)
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(own):
        level, frame = level + 1, frame.f_back
    return level


def _ranks(layer: nn.Module) -> int:
    """How many ranks' values a layer joins."""
    distributed = torch.distributed
    if isinstance(layer, nn.SyncBatchNorm) and distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size(layer.process_group)
    return 1


def warn_of_small_batches(model: nn.Module, minimum: int = 32) -> BatchNormWatch:
    """Warns at the first micro-batch if a training BatchNorm sees few values per channel.

    A channel's values are rows times positions (over all ranks for SyncBatchNorm). A variance from n
    independent values has a relative standard error of ``sqrt(2 / (n - 1))``, a quarter at the default of
    32; neighbouring positions of an image are worth less. Every layer is looked at the first time it runs
    in training mode; the first that is too small warns, once for the model.

    Args:
        model: a model with BatchNorm layers.
        minimum: values per channel that are enough, at least 2.

    Returns:
        A handle; its ``remove()`` ends the watch, which ends by itself after the first micro-batch.

    Raises:
        TypeError, ValueError: a wrong argument, or the model has no BatchNorm.
    """
    layers = batch_norms(model)
    return BatchNormWatch(layers, arguments.whole(minimum, "minimum", 2, "values per channel"))


# ------------------------------------------------------------------------------------- statistics


class _Reached(Exception):
    """A forward pass has come to the layer that is measured; the rest of it is of no interest."""


class _Moments:
    """Count, mean and sum of squared differences per channel, float64, joined as by Chan et al. 1983."""

    def __init__(self, channels: int, device: torch.device) -> None:
        self.count = 0
        self.mean = torch.zeros(channels, dtype=torch.float64, device=device)
        self.squares = torch.zeros_like(self.mean)

    def add(self, x: Tensor) -> None:
        """Joins the values of [rows, channels, ...]."""
        values = x.detach().double().transpose(0, 1).flatten(1)  # [channels, values]
        count = values.shape[1]
        if count == 0:
            return
        mean = values.mean(1)
        apart, total = mean - self.mean, self.count + count
        self.squares += (values - mean[:, None]).square().sum(1) + apart.square() * (
            self.count * count / total
        )
        self.mean += apart * (count / total)
        self.count = total


def virtual_batch_norm_statistics(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> None:
    """Sets the running statistics to those of all of ``loader`` as if it were one batch, exactly.

    What is left in ``running_mean`` and ``running_var`` after training is a moving average over micro-batches
    that lags behind the weights and joins the micro-batches' variances as if their means were equal. This
    recomputes both for the weights as they are ("precise BatchNorm", Wu & Johnson 2021), over a virtual
    batch, over several, or over the training set: the mean and the (unbiased) variance that one forward pass
    of everything together in training mode would give.

    Later layers depend on the statistics of earlier ones, so the layers are measured one after the other:
    one pass over ``loader`` per BatchNorm layer, each ended where it reaches that layer, without gradients,
    and one before to see which comes when. Other layers run in evaluation mode (no dropout). A BatchNorm that
    is in evaluation mode in a model that trains was frozen, and stays as it is; so does one that no
    micro-batch reaches, with a warning. On several ranks each uses its own loader.

    Args:
        model: a model with BatchNorm layers; their statistics are written in place, nothing else changes
            (other buffers are put back).
        loader: micro-batches; it is gone through several times and must give the same rows each time, in any
            order and split.
        forward: ``forward(model, batch)`` runs the model; by default a batch that is a tensor is its input,
            of a tuple or list the first item is, and of a mapping the items are its keyword arguments.

    Raises:
        TypeError: ``loader`` is an iterator, which can be gone through once only.
        ValueError: no BatchNorm with running statistics is reached, one runs several times in a forward pass,
            or ``loader`` holds fewer than two values per channel, or values that are not finite. Statistics
            are unchanged then, as after an error of ``forward``.
        RuntimeError: which BatchNorm runs first depends on the data.
    """
    layers: dict[Any, str] = {
        layer: name
        for name, layer in batch_norms(model).items()
        if layer.running_mean is not None and (layer.training or not model.training)
    }
    if not layers:
        raise ValueError("no BatchNorm layer of this model keeps running statistics and is not frozen")
    if not isinstance(loader, Iterable):
        raise TypeError(f"loader must be an iterable of micro-batches, got {type(loader).__name__}")
    if iter(loader) is loader:
        raise TypeError(
            f"loader is a {type(loader).__name__}, which can be gone through only once, and there is one "
            "pass per layer: give a list of micro-batches or a DataLoader"
        )
    run = _forward if forward is None else forward
    before = {layer: (layer.running_mean.clone(), layer.running_var.clone()) for layer in layers}
    modes = {module: module.training for module in model.modules()}
    unbiased: dict[Any, Tensor] = {}
    others = Buffers(model, (t for layer in layers for t in (layer.running_mean, layer.running_var)))
    try:
        with torch.no_grad():
            model.eval()
            for layer in _order(model, layers, loader, run):
                moments = _measure(model, layer, set(layers) - unbiased.keys(), loader, run)
                if moments.count < 2:
                    raise ValueError(
                        f"loader holds {moments.count} values per channel for {layers[layer]}: a variance "
                        "needs two"
                    )
                if not bool(moments.squares.isfinite().all()):
                    raise ValueError(f"loader gives {layers[layer]} values that are not finite")
                # Later layers must see what training mode gives them, and that divides by n.
                layer.running_mean.copy_(moments.mean)
                layer.running_var.copy_(moments.squares / moments.count)
                unbiased[layer] = moments.squares / (moments.count - 1)
            for layer, variance in unbiased.items():
                layer.running_var.copy_(variance)
    except BaseException:
        for layer, (mean, variance) in before.items():
            layer.running_mean.copy_(mean)
            layer.running_var.copy_(variance)
        raise
    finally:
        others.put_back()
        for module, training in modes.items():
            module.training = training


def _forward(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0] if isinstance(batch, (tuple, list)) else batch)


def _order(
    model: nn.Module,
    layers: Mapping[_BatchNorm, str],
    loader: Iterable[Any],
    run: Callable[[nn.Module, Any], Any],
) -> Iterator[Any]:
    """The layers in the order in which the micro-batches come to them."""
    calls: list[_BatchNorm] = []
    order: list[_BatchNorm] = []
    handles = [layer.register_forward_pre_hook(lambda layer, _: calls.append(layer)) for layer in layers]
    is_empty = True
    try:
        for batch in loader:
            is_empty = False
            calls.clear()
            run(model, batch)
            for layer in set(calls):
                if calls.count(layer) > 1:
                    raise ValueError(
                        f"BatchNorm layer {layers[layer]} runs {calls.count(layer)} times in one forward "
                        "pass: one mean and variance cannot stand for all. Give each use a layer of its own"
                    )
            # A layer that this micro-batch is the first to reach comes right behind the one before it.
            place = 0
            for layer in calls:
                if layer not in order:
                    order.insert(place, layer)
                place = order.index(layer) + 1
    finally:
        for handle in handles:
            handle.remove()
    if is_empty:
        raise ValueError("loader holds no micro-batch")
    if not order:
        raise ValueError("the forward pass reaches no BatchNorm layer: pass forward=, as you run the model")
    missed = [name for layer, name in layers.items() if layer not in order]
    if missed:
        warnings.warn(
            f"no micro-batch reaches {missed[0]} ({len(missed)} of {len(layers)} BatchNorm layers): the "
            "statistics there stay as they are",
            UserWarning,
            stacklevel=3,
        )
    return iter(order)


def _measure(
    model: nn.Module,
    layer: Any,
    unknown: set[_BatchNorm],
    loader: Iterable[Any],
    run: Callable[[nn.Module, Any], Any],
) -> _Moments:
    """The moments of one layer's inputs; ``unknown`` are the layers without new statistics, it among them."""
    moments = _Moments(layer.num_features, layer.running_mean.device)

    def reached(module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module is not layer:
            raise RuntimeError(
                "which BatchNorm layer runs first depends on the micro-batch: their statistics cannot be "
                "measured one after the other"
            )
        moments.add(_input(inputs, kwargs))
        raise _Reached

    handles = [module.register_forward_pre_hook(reached, with_kwargs=True) for module in unknown]
    try:
        for batch in loader:
            try:
                run(model, batch)
            except _Reached:
                pass
    finally:
        for handle in handles:
            handle.remove()
    return moments
