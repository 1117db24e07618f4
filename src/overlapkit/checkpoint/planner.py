"""Planner: takes a state apart for a save, and does not do again what it has in common with the last one."""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from overlapkit.checkpoint.collector import collector_paused
from overlapkit.checkpoint.fileplan import FilePlan
from overlapkit.checkpoint.late import Late
from overlapkit.checkpoint.layout import take_fixed, take_loose
from overlapkit.checkpoint.outline import Outline
from overlapkit.checkpoint.pieces import Inventory


@dataclass(frozen=True)
class Share:
    """What this rank writes of one save.

    Attributes:
        entries: For each key of the state its kind and its typed JSON.
        plan: Where the tensors go.
        late: Those at `plan.late`, which are copied beside the next step.
        now: Those at `plan.now`, which are copied at once.
        optimizers: Those whose steps wait for the late ones.
        device: The CUDA device that there are tensors on, else the CPU.
    """

    entries: dict[str, Any]
    plan: FilePlan
    late: Late
    now: list[torch.Tensor]
    optimizers: list[Optimizer]
    device: torch.device


@dataclass(frozen=True)
class _Known:
    """What one save leaves to the next: `now` without the loose tensors, of which only `loose` is known."""

    fixed: Inventory
    outline: Outline
    plan: FilePlan
    late: Late
    now: list[torch.Tensor]
    loose: tuple[Any, ...]
    device: torch.device


class Planner:
    """Takes states apart.

    Invariants:
        * A plan is used again only for the very tensors that it was made for (see Outline), beside loose
          ones with the names, dtypes and shapes that it was made for.
        * Between saves it holds tensors of modules and optimizers, as long as all of these live.

    Args:
        rank: This process's rank.
        late: Whether what changes in `optimizer.step()` only may be copied late.
    """

    def __init__(self, rank: int, *, late: bool) -> None:
        self._rank = rank
        self._late = late
        self._known: _Known | None = None

    def take(self, state: Mapping[str, Any]) -> Share:
        """Take a checked state apart.

        Raises:
            TypeError: Something in it cannot be kept; the message names its path.
        """
        known = self._known
        if known is not None and not (known.outline.same(state) and known.late.in_place()):
            known = self._known = None
        if known is not None:
            return self._take(state, known)
        with collector_paused():
            return self._take(state, None)

    def _take(self, state: Mapping[str, Any], known: _Known | None) -> Share:
        fixed = take_fixed(state, self._rank, late=self._late) if known is None else known.fixed
        loose = take_loose(state, self._rank, fixed)
        if known is None or known.loose != _kind_of(loose):
            outline = Outline(state, fixed.pieces, self._forgetting()) if known is None else known.outline
            known = self._known = _plan(fixed, outline, loose)
        now = [piece.data for piece in loose.pieces if piece.slot.alias is None and piece.slot.nbytes]
        return Share(loose.entries, known.plan, known.late, known.now + now, fixed.optimizers, known.device)

    def forget(self) -> None:
        """Let go of all tensors, and of the staging buffers that a plan has views of."""
        self._known = None

    def is_behind(self, state: Mapping[str, Any]) -> bool:
        """Whether, at a glance, the next save must plan anew: nothing is known, or optimizers got a state."""
        known = self._known
        return known is None or known.outline.optimizer_states != [
            len(item.state) for item in state.values() if isinstance(item, Optimizer)
        ]

    def _forgetting(self) -> Any:
        alive = weakref.ref(self)

        def forget() -> None:
            if (planner := alive()) is not None:
                planner.forget()

        return forget


def _plan(fixed: Inventory, outline: Outline, loose: Inventory) -> _Known:
    pieces = fixed.pieces + loose.pieces
    plan = FilePlan([piece.slot for piece in pieces], fixed.left_out + loose.left_out)
    on_cuda = (piece.data.device for piece in pieces if piece.slot.device == "cuda")
    device = next(on_cuda, torch.device("cpu"))
    start_of = {place: start for start, place in plan.in_file()}
    late = Late([pieces[place] for place in plan.late], [start_of[place] for place in plan.late], device)
    now = [pieces[place].data for place in plan.now if place < len(fixed.pieces)]
    return _Known(fixed, outline, plan, late, now, _kind_of(loose), device)


def _kind_of(loose: Inventory) -> tuple[Any, ...]:
    return [piece.slot for piece in loose.pieces], loose.left_out
