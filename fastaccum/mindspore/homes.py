"""Where parameters lie: loaded values are brought to the memory that compiled graphs know.

A function that MindSpore has compiled goes on with the memory that a parameter had at its first run.
``set_data``, and with it ``load_param_into_net``, hands the parameter other memory, and such a function keeps
reading and writing the old one. So the old memory, the parameter's *home*, is kept; the loaded values are
copied into it, and the parameter gets it back.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from types import CodeType, FunctionType
from typing import Any

from mindspore import Parameter, Tensor, nn


class Homes:
    """The homes of some parameters.

    Args:
        parameters: as for :meth:`keep`.
    """

    def __init__(self, parameters: Iterable[Parameter] = ()) -> None:
        self._parameters: list[Parameter] = []
        self._homes: list[Tensor] = []
        self._pointers: list[int] = []
        self.keep(parameters)

    def __contains__(self, parameter: Parameter) -> bool:
        """Whether it is one of them."""
        return any(parameter is known for known in self._parameters)

    def keep(self, parameters: Iterable[Parameter]) -> None:
        """Takes the memory that these have now for their home, but for those that have one already."""
        known = {id(parameter) for parameter in self._parameters}
        for parameter in parameters:
            pointer = parameter.data_ptr()
            if id(parameter) in known or not pointer:  # without memory: nothing can have run with it
                continue
            known.add(id(parameter))
            self._parameters.append(parameter)
            self._homes.append(Tensor(parameter))  # the same memory, which it keeps alive
            self._pointers.append(pointer)

    def at_home(self, parameter: Parameter) -> Tensor:
        """What lies in the home of one of them."""
        return self._homes[[p is parameter for p in self._parameters].index(True)]

    def moved(self) -> list[int]:
        """The numbers of those that were given other memory; costs half a microsecond for each parameter."""
        now = [parameter.data_ptr() for parameter in self._parameters]
        if now == self._pointers:
            return []
        return [i for i, (a, b) in enumerate(zip(now, self._pointers, strict=True)) if a != b]

    def settle(self) -> None:
        """Brings the values of those that were given other memory home.

        Raises:
            RuntimeError: one has another shape or dtype; nothing has changed.
        """
        moved = self.moved()
        for i in moved:
            now, home = self._parameters[i], self._homes[i]
            if now.shape != home.shape or now.dtype != home.dtype:
                raise RuntimeError(
                    f"{now.name} was {str(home.dtype).lower()} of shape {tuple(home.shape)} when graphs were "
                    f"compiled for it, and is {str(now.dtype).lower()} of shape {tuple(now.shape)}: wrap the "
                    "optimizer again"
                )
        for i in moved:
            self._homes[i].copy_(Tensor(self._parameters[i])).asnumpy()  # which waits until it is done
            self._parameters[i].set_data(self._homes[i], slice_shape=self._parameters[i].sliced)


def held_by(network: nn.Cell | Callable[..., Any]) -> list[Parameter]:
    """The parameters of a network: of a cell, or of whatever a function refers to by name."""
    found: list[Parameter] = []
    seen: dict[int, Any] = {}  # holds them: an id is given again once its object is gone

    def look(thing: Any) -> None:
        if id(thing) in seen:
            return
        seen[id(thing)] = thing
        if isinstance(thing, Parameter):
            found.append(thing)
        elif isinstance(thing, nn.Cell):
            found.extend(thing.get_parameters())
        elif isinstance(thing, (list, tuple)):
            for item in thing:
                look(item)
        elif isinstance(thing, dict):
            look(list(thing.values()))
        elif isinstance(thing, functools.partial):
            look([thing.func, thing.args, thing.keywords])
        elif inspect.ismethod(thing):
            look([thing.__func__, thing.__self__, getattr(thing.__self__, "__dict__", {})])
        elif inspect.isfunction(thing) and not (thing.__module__ or "").startswith("mindspore."):
            look(_named_in(thing))

    look(network)
    return found


def _named_in(function: FunctionType) -> list[Any]:
    """What a function's free variables and global names stand for."""
    things: list[Any] = []
    for cell in function.__closure__ or ():
        try:
            things.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    codes = [function.__code__]
    for code in codes:
        things += [function.__globals__[name] for name in code.co_names if name in function.__globals__]
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return things
