"""Notes that gradients arrived: one hook per parameter, which goes when its wrapper goes.

A hook that runs Python costs 1 to 2 microseconds per parameter and backward. Most parameters need only
be noted, and ``list.append`` is that hook without a Python frame. ``WATCHED`` of them also
have the version of their gradient recorded when backward has ended, so that a foreign clip, which changes
every gradient in place, is noticed, and whether the backward that brought it came to its end.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

WATCHED = 64

# Which wrapper takes a parameter's gradients: two of them would each see half.
_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _register(param: Tensor, hook: Callable[[Tensor], None]) -> Any:
    # Registering needs requires_grad; a frozen parameter may be unfrozen at any time, and then its
    # hook must be there already.
    frozen = not param.requires_grad
    if frozen:
        param.requires_grad_(True)
    try:
        return param.register_post_accumulate_grad_hook(hook)
    finally:
        if frozen:
            param.requires_grad_(False)


class Arrivals:
    """The hooks of one wrapper and what they have noted since the last micro-batch was closed.

    Attributes:
        noted: the parameters in order of arrival, once per backward that reached them.
    """

    def __init__(
        self,
        owner: Any,
        hook: Callable[[Tensor], None] | None,
        begins: Callable[[], Any],
        ended: Callable[[list[Tensor], Any], None],
    ) -> None:
        """Prepares the hooks of ``owner``.

        Args:
            owner: the wrapper; held weakly.
            hook: called with each parameter whose gradient arrived, instead of noting it.
            begins: called when a backward brings its first watched gradient.
            ended: called at its end with the watched parameters that it has reached and what ``begins`` gave.
        """
        self._begins, self._ended = begins, ended
        self.noted: list[Tensor] = []
        self._versions: dict[int, tuple[Any, Any, int]] = {}
        # Backward calls that have not ended: the watched parameters that each brought, what begins() gave.
        self._unfinished: dict[int, tuple[list[Tensor], Any]] = {}
        self._hook = hook
        self._owner: weakref.ref[Any] = weakref.ref(owner)
        self._released = False
        self._handles: dict[int, tuple[Any, Any]] = {}
        weakref.finalize(owner, _release, self._handles, self.noted).atexit = False

    def check(self, params: list[Tensor]) -> None:
        """Raises ValueError if a parameter belongs to another live wrapper."""
        for i, param in enumerate(params):
            owner = _owners[param]() if param in _owners else None
            if owner is not None and owner is not self._owner():
                raise ValueError(
                    f"parameter {i} (shape {list(param.shape)}) is owned by {owner._known_as}, or give each "
                    "optimizer its own parameters"
                )

    def watch(self, params: list[Tensor]) -> None:
        """Hooks parameters that have no hook yet and lets go of those that are not in the list."""
        if self._released:
            return
        self.check(params)
        wanted = {id(p) for p in params}
        for key in [key for key in self._handles if key not in wanted]:
            reference, handle = self._handles.pop(key)
            handle.remove()
            if reference() is not None:
                _owners.pop(reference(), None)
        watched = _spread([param for param in params if id(param) not in self._handles])
        for param in params:
            if id(param) in self._handles:
                continue
            if self._hook is not None:
                hook = self._hook
            elif id(param) in watched:
                hook = self._note_version
            else:
                hook = self.noted.append
            self._handles[id(param)] = (weakref.ref(param), _register(param, hook))
            _owners[param] = self._owner

    def release(self) -> None:
        """Lets go of all parameters, which another wrapper may own until :meth:`claim`."""
        _release(self._handles, self.noted)
        self.clear()
        self._released = True

    def claim(self, params: list[Tensor]) -> None:
        """Hooks the parameters again after :meth:`release`.

        Raises:
            ValueError: one of them is another's by now; nothing has changed then.
        """
        self.check(params)
        self._released = False
        self.watch(params)

    @property
    def _note_version(self) -> Callable[[Tensor], None]:
        noted, versions, unfinished = self.noted, self._versions, self._unfinished
        queue = torch.autograd.Variable._execution_engine.queue_callback
        begins, ended = self._begins, self._ended

        def end(task: int) -> None:
            if task not in unfinished:  # dropped meanwhile
                return
            arrived, begun = unfinished.pop(task)
            ended(arrived, begun)
            for param in arrived:
                if param.grad is not None:
                    versions[id(param)] = (weakref.ref(param), weakref.ref(param.grad), param.grad._version)

        def note(param: Tensor) -> None:
            noted.append(param)
            if torch.compiler.is_compiling():  # compiled autograd traces hooks and has no task numbers
                return
            task = graph_task()
            if task not in unfinished:
                if task == -1:
                    return
                unfinished[task] = ([], begins())
                # Queued from the end of the queue: after the hooks of others and DDP's reducer, which may
                # write gradients while backward runs.
                queue(lambda: queue(lambda: end(task)))
            unfinished[task][0].append(param)

        return note

    def changed_in_place(self) -> bool:
        """Whether a watched gradient that still lies in ``.grad`` was written after it arrived."""
        for parameter, gradient, version in self._versions.values():
            param, grad = parameter(), gradient()
            if param is not None and grad is not None and param.grad is grad and grad._version != version:
                return True
        return False

    def repeated(self, times: int) -> bool:
        """Whether the pending micro-batch seems to be that many backward calls over the same parameters."""
        n, rest = divmod(len(self.noted), times)
        return n > 0 and rest == 0 and all(self.noted[0] is again for again in self.noted[::n])

    @property
    def broken(self) -> bool:
        """Whether a backward that brought watched gradients never came to its end."""
        return bool(self._unfinished) and graph_task() == -1

    def clear(self) -> None:
        """Forgets what was noted."""
        self.noted.clear()
        self._unfinished.clear()
        self._versions.clear()


def _spread(params: list[Tensor]) -> set[int]:
    """Ids of the parameters to watch: spread evenly, with the last, whose gradient tends to come first."""
    trained = [param for param in params if param.requires_grad] or params
    number = min(len(trained), WATCHED)
    return {id(trained[-1 - i * len(trained) // number]) for i in range(number)}


def _release(handles: dict[int, tuple[Any, Any]], noted: list[Tensor]) -> None:
    for reference, handle in handles.values():
        handle.remove()
        param = reference()
        if param is not None:
            _owners.pop(param, None)
    handles.clear()
    noted.clear()


def graph_task() -> int:
    """The number of the backward call that runs now; -1 outside of one."""
    return torch._C._current_graph_task_id()
