"""One step of some parameters: through the kernel, through torch's own, or in plain torch."""

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from overlapkit import launch
from overlapkit.optim import plain
from overlapkit.optim.by_torch import alike
from overlapkit.optim.clip import clip_by_global_norm_, clip_factor, global_norm, summed_over_meshes
from overlapkit.optim.columns import FP32, PLAIN
from overlapkit.optim.gradients import laid_out
from overlapkit.optim.state import is_dense, local
from overlapkit.optim.table import Entry, Table

_IN_KERNEL = (torch.float32, torch.bfloat16)  # parameters; gradients may be fp16, too


class Updater:
    """Steps the same parameters again and again.

    Args:
        entries: The parameters that have a gradient.
        groups: All groups.
        graphs: Takes what captured CUDA graphs read, which must outlive this object.
    """

    def __init__(
        self, entries: Sequence[Entry], groups: Sequence[dict[str, Any]], graphs: list[Table]
    ) -> None:
        self._entries = list(entries)
        self._graphs = graphs
        self._in_kernel: dict[torch.device, list[int]] = {}
        self._by_torch: list[int] = []
        self._plainly: list[int] = []
        for i, entry in enumerate(entries):
            here, group = local(entry.param), groups[entry.group]
            own = group.get("fused") is not False and is_dense(here) and here.dtype in _IN_KERNEL
            if own and launch.through_triton(here):
                self._in_kernel.setdefault(here.device, []).append(i)
            elif entry.form.mode == PLAIN and entry.form.moments == FP32:
                self._by_torch.append(i)
            else:
                self._plainly.append(i)
        self._calls = alike(self._entries, self._by_torch)
        self._tables: dict[torch.device, Table] = {}
        self._looks: dict[torch.device, Any] = {}
        self._sharded = any(local(entry.param) is not entry.param for entry in entries)
        self._changed = [
            t for i in sum(self._in_kernel.values(), []) for t in _memory(self._entries[i].param)
        ]

    @torch.no_grad()
    def step(
        self,
        grads: Sequence[Tensor],
        groups: Sequence[dict[str, Any]],
        max_norm: float | None,
        scale: Tensor | None,
        found_inf: Tensor | None,
        done: dict[torch.device, Tensor],
    ) -> Tensor | None:
        """Update all parameters.

        Args:
            grads: Their gradients, DTensors or plain, of any strides and floating dtype.
            groups: All groups.
            max_norm: Clip to this global norm, or None.
            scale: What gradients are to be divided by first, or None.
            found_inf: Not zero where nothing is to be updated, or None.
            done: The kernel's counter on each device, kept from step to step.

        Returns:
            The global norm of the gradients after division by scale; None without `max_norm`.
        """
        norm = factor = None
        whole = len(self._in_kernel) == 1 and not (self._by_torch or self._plainly)
        if max_norm is not None and not whole:
            norm = global_norm(grads)
            if scale is not None:
                norm = norm / scale
            factor = clip_factor(max_norm, norm)
            plainly = set(self._plainly)
            in_place = [grad for i, grad in enumerate(grads) if i not in plainly]
            clip_by_global_norm_(in_place, max_norm, norm)
            max_norm = None
        for device, places in self._in_kernel.items():
            flat = self._laid_out(device, places, grads)
            found = self._launch(device, places, flat, groups, max_norm, scale, found_inf, done)
            norm = norm if found is None else found
        if self._changed:
            torch.autograd.graph.increment_version(self._changed)
        if self._plainly:
            self._step_plainly(grads, groups, factor, scale, found_inf)
        for call in self._calls:
            call.step(grads, groups[call.group], scale, found_inf)
        return norm

    def _laid_out(self, device: torch.device, places: list[int], grads: Sequence[Tensor]) -> list[Tensor]:
        """`laid_out`, without asking each one again where all look as in the step before."""
        mine = [grads[i] for i in places]
        if self._sharded:
            return [laid_out(self._entries[i].param, grads[i]) for i in places]
        look = [grad.dtype for grad in mine], [grad.stride() for grad in mine]
        if look == self._looks.get(device):
            return mine
        flat = [laid_out(self._entries[i].param, grads[i]) for i in places]
        if all(map(is_, flat, mine)):
            self._looks[device] = look
        return flat

    def _launch(
        self,
        device: torch.device,
        places: list[int],
        grads: list[Tensor],
        groups: Sequence[dict[str, Any]],
        max_norm: float | None,
        scale: Tensor | None,
        found_inf: Tensor | None,
        done: dict[torch.device, Tensor],
    ) -> Tensor | None:
        from overlapkit.optim.raw import launcher

        table = self._tables.get(device)
        pointers = [grad.data_ptr() for grad in grads]
        if table is None or not table.fits(grads, pointers):
            table = self._tables[device] = Table([self._entries[i] for i in places], grads)
        table.refresh(grads, pointers, groups, max_norm)
        if table.captured and table not in self._graphs:
            self._graphs.append(table)
        if device not in done:
            done[device] = torch.zeros(1, dtype=torch.int32, device=device)
        sums = norm = None
        if max_norm is not None:
            sums = summed_over_meshes(launcher.squares(table), table.meshes)
            norm = torch.empty((), device=device)
        scale, found_inf = (t if t is None else t.to(device, torch.float32) for t in (scale, found_inf))
        launcher.update(table, done[device], scale, found_inf, sums, norm)
        return norm

    def _step_plainly(
        self,
        grads: Sequence[Tensor],
        groups: Sequence[dict[str, Any]],
        factor: Tensor | None,
        scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """On the CPU only: it looks at numbers."""
        if found_inf is not None and found_inf.item():
            return
        if scale is not None:
            factor = 1.0 / scale if factor is None else factor * (1.0 / scale)
        for i in self._plainly:
            entry = self._entries[i]
            entry.state["step"].add_(1)
            plain.update(entry, laid_out(entry.param, grads[i]), groups[entry.group], factor)


def _memory(param: Tensor) -> list[Tensor]:
    """The tensors whose version counters tell of a change: of a DTensor its own and its local part's."""
    return [param] if local(param) is param else [param, local(param)]
