"""Which phase of a step is on: public hooks on the model, its outputs and the optimizer turn a timeline."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from overlapkit.measure.compiled_call import unwatch, watch
from overlapkit.measure.hooks import Hook, differentiable, nodes
from overlapkit.measure.timeline import Timeline
from overlapkit.optimizer_step import at_update


class Phases:
    """The hooks, and the timeline that they turn.

    Args:
        model: The outermost module, or None.
        optimizer: Or None.

    Attributes:
        timeline: Of the period that is on, where it is measured.
        inside: Whether a step is on.
        pauses: How many pauses are on, one inside the other.
        close: Whether this step is looked at closely.
        on_turn: Called in such a step before each turn, with the phase that ends and the one that begins.
    """

    def __init__(self, model: nn.Module | None, optimizer: Optimizer | None) -> None:
        self.timeline: Timeline | None = None
        self.inside = False
        self.pauses = 0
        self.close = False
        self.on_turn: Callable[[str, str], None] | None = None
        self._calls = 0  # of the model, one inside the other
        self._model = model
        self._gradient_hook = Hook(self._on_gradient)
        self._hooks: list[Any] = []
        if model is not None:  # outermost: what a wrapper hooks in (FSDP2's all-gather) is part of the call
            self._hooks.append(model.register_forward_pre_hook(Hook(self._on_call), prepend=True))
            self._hooks.append(model.register_forward_hook(Hook(self._on_return), always_call=True))
        if optimizer is not None:
            self._hooks.append(optimizer.register_step_pre_hook(Hook(self._on_optimizer)))
            self._hooks.append(optimizer.register_step_post_hook(Hook(self._on_optimizer_done)))

    def enter(self) -> None:
        """A step begins."""
        if self._model is not None and self._model._compiled_call_impl is not None:
            watch(self._model, self._on_call, self._on_return)
        self.inside = True
        self._calls = 0
        self.turn("inside")

    def turn(self, kind: str) -> None:
        """Begin a phase, unless a pause is on or the period is not measured."""
        timeline = self.timeline
        if timeline is None or self.pauses:
            return
        if self.close and self.on_turn is not None and timeline.kind != kind:
            self.on_turn(timeline.kind, kind)
        timeline.turn(kind)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """What the body does belongs to no phase."""
        timeline = self.timeline
        before = timeline.kind if timeline else ""
        self.turn("paused")
        self.pauses += 1
        try:
            yield
        finally:
            self.pauses -= 1
            self.turn(before if self.timeline is timeline else "outside")  # a step may have ended meanwhile

    def remove(self) -> None:
        """Take every hook off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._model is not None:
            unwatch(self._model, self)

    def _on_call(self, module: nn.Module, args: object) -> None:
        self._calls += 1
        if self.inside:
            self.turn("forward")

    def _on_return(self, module: nn.Module, args: object, output: object) -> None:
        self._calls = max(0, self._calls - 1)
        if self._calls or not self.inside or self.pauses or self.timeline is None:
            return
        outputs = differentiable(output)
        for node in nodes(outputs):
            node.register_prehook(self._gradient_hook)
        loss_follows = bool(outputs) and all(tensor.numel() != 1 for tensor in outputs)
        self.turn("loss" if loss_follows else "inside")

    def _on_gradient(self, gradients: object) -> None:
        if self.inside:
            self.turn("backward")

    def _on_optimizer(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return at_update(args, kwargs, self._on_update)

    def _on_update(self) -> None:
        if self.inside:
            self.turn("optimizer")

    def _on_optimizer_done(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if self.inside:
            self.turn("inside")
