"""Which modules run their forward again inside backward: activation checkpointing, whoever does it.

Reentrant or not, torch.utils.checkpoint and what is built on it call the module again, and its hooks with
it. A first look hooks every module for the length of one backward; later ones only those that were called.
"""

from typing import Any

from torch import nn

from overlapkit.measure.hooks import Hook
from overlapkit.measure.phases import Phases


class Recomputation:
    """Hooks for the length of a backward that is looked at closely.

    Args:
        model: The outermost module.
        phases: Turned to "recompute" when a module is called inside backward, and back when that is over.
    """

    def __init__(self, model: nn.Module, phases: Phases) -> None:
        self._model = model
        self._phases = phases
        self._found: list[nn.Module] = []
        self._called: list[nn.Module] = []  # one inside the other
        self._handles: list[Any] = []

    def attach(self, *, everywhere: bool) -> None:
        """Backward begins. With `everywhere` it is found out anew which modules are called."""
        if self._handles:
            return
        watched = self._found
        if everywhere:
            watched = [part for part in self._model.modules() if part is not self._model]
            self._found = []
        for module in watched:
            self._handles.append(module.register_forward_pre_hook(Hook(self._on_call), prepend=True))
            self._handles.append(module.register_forward_hook(Hook(self._on_return), always_call=True))

    def detach(self) -> None:
        """The step is over."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._called.clear()

    def _on_call(self, module: nn.Module, args: object) -> None:
        timeline = self._phases.timeline
        if timeline is None or timeline.kind not in ("backward", "recompute"):
            return  # the forward of the next microbatch
        if not self._called:
            self._phases.turn("recompute")
            if module not in self._found:
                self._found.append(module)
        self._called.append(module)

    def _on_return(self, module: nn.Module, args: object, output: object) -> None:
        """Also where torch stops the forward early, by an exception."""
        if self._called:
            self._called.pop()
            if not self._called:
                self._phases.turn("backward")
