"""Where an optimizer's step begins to change parameters, in loops that wrap it or hand it a closure.

Accelerate's wrapper has no hooks, and Lightning runs forward and backward inside `step(closure)`.
"""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

_HOOKS = "_optimizer_step_pre_hooks"


def with_hooks(optimizer: Optimizer, argument: str = "optimizer") -> Optimizer:
    """The optimizer itself, or the one that a wrapper without hooks holds as its `optimizer`.

    Args:
        optimizer: Any Optimizer.
        argument: The caller's name for it, used in errors.

    Raises:
        TypeError: It never ran `Optimizer.__init__`, and holds no optimizer that did.
    """
    found: Any = optimizer
    while isinstance(found, Optimizer) and not hasattr(found, _HOOKS):
        found = getattr(found, "optimizer", None)
    if not isinstance(found, Optimizer):
        raise TypeError(
            f"{argument}={type(optimizer).__name__} has no hooks and wraps no optimizer that has: call "
            "torch.optim.Optimizer.__init__ in its __init__, or give the optimizer that it wraps"
        )
    return found


def at_update(args: tuple[Any, ...], kwargs: dict[str, Any], act: Callable[[], None]) -> Any:
    """Call `act` where a step begins to change parameters: after its closure, or now if it has none.

    Args:
        args: What a step pre-hook was given, the optimizer first.
        kwargs: The same.
        act: Called each time that the closure has run.

    Returns:
        What the pre-hook must return.
    """
    closure = kwargs["closure"] if "closure" in kwargs else (*args, None)[1]
    if not callable(closure):
        act()
        return None

    def closure_then_act() -> Any:
        loss = closure()
        act()
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure_then_act}
    return (args[0], closure_then_act, *args[2:]), kwargs


def before_update(args: tuple[Any, ...], kwargs: dict[str, Any], act: Callable[[], None]) -> Any:
    """Call `act` before a step changes anything: as `at_update` does, or now where that may be too late.

    Sharpness-aware optimizers move the parameters, and then call the closure: of torch's and ours alone it is
    known that the closure comes first.

    Args:
        args: What a step pre-hook was given, the optimizer first.
        kwargs: The same.
        act: Called each time that the closure has run, or once.

    Returns:
        What the pre-hook must return.
    """
    if type(args[0]).step.__module__.startswith(("torch.optim.", "overlapkit.")):
        return at_update(args, kwargs, act)
    act()
    return None
