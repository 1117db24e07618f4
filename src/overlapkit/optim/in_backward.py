"""The optimizer inside backward: a parameter is updated once its gradient is complete, and that is freed."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from overlapkit.optim.gradients import check_dense
from overlapkit.optim.optimizer import AdamW
from overlapkit.optim.state import local
from overlapkit.optim.updating import Updater


def optimizer_in_backward(model: nn.Module, **options: Any) -> "AdamWInBackward":
    """Let backward update each parameter of a model once its gradient is complete, and free the gradient.

    No two gradients need be there at the same time. What needs all of them at once cannot be had with it:
    clipping by the global norm, accumulation over several backwards, a GradScaler.

    Args:
        model: A module, also after `shard`; not inside DistributedDataParallel.
        options: AdamW's, without `max_norm`.

    Returns:
        The optimizer, for schedules, checkpoints and `step()`, which must be called once after each
        backward and updates nothing: it tells one step from the next.

    Raises:
        ValueError: `max_norm` was given, the model is a DistributedDataParallel or has nothing to train.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: give an nn.Module")
    if options.get("max_norm") is not None:
        raise ValueError(
            f"max_norm={options['max_norm']!r}: the global norm is known only after backward, when every "
            "parameter has been updated; use AdamW(max_norm=...)"
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError(
            "model is a DistributedDataParallel, which averages gradients after they are complete here: use "
            "overlapkit.shard, or AdamW"
        )
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    if not named:
        raise ValueError("model has no parameter that requires a gradient: nothing would be updated")
    return AdamWInBackward(named, **options)


class AdamWInBackward(AdamW):
    """What `optimizer_in_backward` returns: an AdamW whose updates run in hooks of its parameters."""

    def __init__(self, named: Sequence[tuple[str, Tensor]], **options: Any) -> None:
        self._names: dict[Tensor, str] = {}
        self._updated: set[Tensor] = set()
        self._hooks: list[Any] = []
        super().__init__(list(named), **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of named parameters, which backward updates from now on."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for name, param in zip(group["param_names"], group["params"], strict=True):
            self._names[param] = name
            if param.requires_grad:
                self._hooks.append(param.register_post_accumulate_grad_hook(self._update))
                param._in_backward_optimizers = [self]  # checkpoints look for it

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:
        raise RuntimeError(
            "a GradScaler unscales gradients after backward, and these were used in it: train in bf16, or "
            "use AdamW with the GradScaler"
        )

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        """AdamW sets it."""

    @torch.no_grad()
    def _update(self, param: Tensor) -> None:
        if param in self._updated:
            raise RuntimeError(
                f"{self._names[param]} got a second gradient before step(): gradients cannot be accumulated, "
                "each backward updates; call step() after each backward, or use AdamW"
            )
        self._updated.add(param)
        updater, planned_for = self._each.get(param, (None, None))
        if updater is None or planned_for != self._where(param):
            updater = self._plan(self._parameters(), [param])
            self._each[param] = updater, self._where(param)
        assert param.grad is not None
        check_dense([param.grad])
        updater.step([param.grad], self.param_groups, None, None, None, self._done)
        param.grad = None

    def _where(self, param: Tensor) -> list[int]:
        """What the plan of a parameter was made for: models may be moved, states replaced."""
        tensors = [param, *self.state.get(param, {}).values()]
        return [local(x).data_ptr() for x in tensors if isinstance(x, Tensor)]

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """End a step: every update of it was made in backward.

        Raises:
            RuntimeError: There is a closure, or a parameter has a gradient that backward did not make.
        """
        if closure is not None:
            raise RuntimeError("closure: parameters are updated inside backward; call backward, then step()")
        left = [name for param, name in self._names.items() if param.grad is not None]
        if left:
            raise RuntimeError(
                f"{left[0]} has a gradient that no backward has made here: it cannot be used; set it to "
                "None, or use AdamW"
            )
        self._updated.clear()

    def remove(self) -> None:
        """Take the hooks out: from then on gradients stay, and nothing is updated."""
        for hook in self._hooks:
            hook.remove()
        for param in self._names:
            vars(param).pop("_in_backward_optimizers", None)

    def __getstate__(self) -> dict[str, Any]:
        raise RuntimeError("an optimizer in backward cannot be copied: make another for the copied model")

    def _forget(self) -> None:
        super()._forget()
        self._each: dict[Tensor, tuple[Updater, list[int]]] = {}
