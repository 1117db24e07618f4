"""A model that is compiled in place: its graph is traced without our hooks, so its calls are watched."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

Before = Callable[[nn.Module, object], None]
After = Callable[[nn.Module, object, object], None]


class CompiledCall:
    """Stands in for what `Module.compile()` made a module call, and tells its owner of each call.

    `nn.Module.compile` leaves no public place for that, and may be called at any time: `watch` looks.

    Args:
        module: The module.
        before: A bound method, called with the module and the arguments before each call.
        after: Called with the output as well, and with None for one where the call has failed.
    """

    def __init__(self, module: nn.Module, before: Before, after: After) -> None:
        self._owner = weakref.ref(before.__self__)  # type: ignore[attr-defined]  # it is a bound method
        self._before: Any = before.__func__  # type: ignore[attr-defined]
        self._after: Any = after.__func__  # type: ignore[attr-defined]
        self._module = weakref.ref(module)
        self._inner: Callable[..., Any] = module._compiled_call_impl  # type: ignore[assignment]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what was compiled."""
        owner, module, output = self._owner(), self._module(), None
        if owner is None:
            return self._inner(*args, **kwargs)
        self._before(owner, module, args)
        try:
            output = self._inner(*args, **kwargs)
        finally:
            self._after(owner, module, args, output)
        return output


def watch(module: nn.Module, before: Before, after: After) -> None:
    """Stand in for a module's compiled call, where it has one and nobody does so for this owner."""
    found: Any = module._compiled_call_impl
    while isinstance(found, CompiledCall):
        if found._owner() is before.__self__:  # type: ignore[attr-defined]
            return
        found = found._inner
    if found is not None:
        module._compiled_call_impl = CompiledCall(module, before, after)


def unwatch(module: nn.Module, owner: object) -> None:
    """Take what stands in for this owner, or for one that is gone, out again."""
    above: Any = None
    found: Any = module._compiled_call_impl
    while isinstance(found, CompiledCall):
        if found._owner() not in (owner, None):
            above = found
        elif above is None:
            module._compiled_call_impl = found._inner
        else:
            above._inner = found._inner
        found = found._inner
