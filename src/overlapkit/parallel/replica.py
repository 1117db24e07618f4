"""What `replicate` returns: DDP whose communication hook names, times and compresses each bucket."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

from overlapkit.parallel.buckets import BucketTimes, all_reduce
from overlapkit.span import Span


class Replica(DistributedDataParallel):
    """One rank's copy of a model.

    DDP reduces the parameters that require gradients when it is made. One that is unfrozen later would
    get a gradient that nobody reduces, and replicas would drift apart: forward refuses that.

    Args:
        model: The plain model.
        group: Over which ranks gradients are averaged.
        wire: Dtype in which gradients travel, or None for their own.
        options: Of DistributedDataParallel.
    """

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup, wire: torch.dtype | None, **options: Any
    ) -> None:
        super().__init__(model, process_group=group, gradient_as_bucket_view=True, **options)
        self._wire = wire
        self._take_hook()

    def timings(self) -> list[Span]:
        """The spans of the buckets reduced since the last call."""
        return self._times.take()

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]  # torch gives it no types
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model, after checking that DDP reduces what is trained.

        Raises:
            RuntimeError: A parameter was frozen or unfrozen since the model was wrapped.
        """
        if torch.is_grad_enabled():
            self._refuse_changes()
        with self._times.roll.naming("a broadcast of DDP's before forward"):
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    def register_comm_hook(self, state: object, hook: Any) -> NoReturn:
        """Refused: DDP has one communication hook, and `replicate` uses it.

        Raises:
            RuntimeError: Always; the message says what to do instead.
        """
        raise RuntimeError(
            "DDP takes one communication hook, and replicate uses it for spans and compression: leave the "
            "hook (or the optimizer in backward, which needs one too) out and use replicate(compress=), or "
            "wrap the plain model in torch's DistributedDataParallel; accumulate takes that as well"
        )

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """DDP's context for uneven inputs; gradients are always divided by the number of all ranks.

        Raises:
            ValueError: `divide_by_initial_world_size` is not set.
        """
        if not divide_by_initial_world_size:
            raise ValueError(
                "divide_by_initial_world_size=False: DDP cannot do that with a communication hook, which "
                "replicate uses; leave it True, or wrap the plain model in torch's DistributedDataParallel"
            )
        with super().join(True, enable, throw_on_early_termination):
            yield

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        for made_anew in ("_times", "_required_gradient", "_comm_hooks"):
            state.pop(made_anew, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._comm_hooks = []
        self._take_hook()

    def _take_hook(self) -> None:
        names = {
            parameter: name
            for name, parameter in self.module.named_parameters()
            if name not in self.parameters_to_ignore
        }
        self._required_gradient = [(parameter, parameter.requires_grad) for parameter in names]
        self._times = BucketTimes(names, self.process_group, self._wire)
        super().register_comm_hook(self._times, all_reduce)

    def _refuse_changes(self) -> None:
        for parameter, before in self._required_gradient:
            if parameter.requires_grad != before and not (before and self.find_unused_parameters):
                self._refuse_change(parameter, before)

    def _refuse_change(self, changed: nn.Parameter, before: bool) -> NoReturn:
        name = next(name for name, parameter in self.module.named_parameters() if parameter is changed)
        raise RuntimeError(
            f"parameter {name} {'required a gradient' if before else 'was frozen'} when replicate was called "
            f"and {'is frozen' if before else 'requires a gradient'} now: "
            + ("DDP would wait for its gradient. " if before else "DDP would not reduce its gradient. ")
            + "Wrap anew: model = replicate(model.module)"
            + (", or give replicate find_unused_parameters=True" if before else "")
        )
