"""What torch's own kernels update: fp32 parameters on the CPU, fp64 ones, or all by `foreach`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from overlapkit.optim.gradients import as_placed, laid_out
from overlapkit.optim.state import is_dense, local
from overlapkit.optim.table import Entry


class Alike:
    """Parameters of one group, device and dtype, which one call of torch's fused kernel updates.

    Works on the ranks' own parts: torch takes no mixture of DTensors and plain tensors in one call.
    """

    def __init__(self, entries: Sequence[Entry], places: Sequence[int]) -> None:
        mine = [entries[i] for i in places]
        self.group = mine[0].group
        self._places = places
        self._owners = [entry.param for entry in mine]
        self._params = [local(entry.param) for entry in mine]
        self._fused = is_dense(self._params[0])  # torch's fused kernel takes all memory for dense
        self._moments = [
            [local(entry.state[name]) for entry in mine]
            for name in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if mine[0].form.amsgrad else []))
        ]
        self._steps = [entry.state["step"] for entry in mine]
        self._sharded = [param for param in self._owners if local(param) is not param]

    def step(
        self, grads: Sequence[Tensor], group: dict[str, Any], scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        """One step, given all gradients, DTensors or plain, of any strides."""
        fused = self._fused and group.get("fused") is not False
        number = not any(isinstance(x, Tensor) and x.is_cuda for x in (group["lr"], *group["betas"]))
        if fused and number:
            self._call_fused(grads, group, scale, found_inf)
        else:
            self._call(grads, group, scale, found_inf, fused)
        if self._sharded:
            torch.autograd.graph.increment_version(self._sharded)

    def _call_fused(
        self, grads: Sequence[Tensor], group: dict[str, Any], scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        """What torch.optim's own function does, without its sorting by device and dtype."""
        dtype, steps, device = self._params[0].dtype, self._steps, self._params[0].device
        flat = [laid_out(self._owners[k], grads[i], (dtype,)) for k, i in enumerate(self._places)]
        maxes = self._moments[2] if group["amsgrad"] else []
        beta1, beta2 = (float(beta) for beta in group["betas"])
        if scale is not None:
            scale = scale.to(device)
        if found_inf is not None:
            found_inf = found_inf.to(device)
        torch._foreach_add_(steps, torch.ones((), device="cpu") if steps[0].is_cpu else 1)
        torch._fused_adamw_(
            self._params,
            flat,
            self._moments[0],
            self._moments[1],
            maxes,
            steps,
            lr=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            weight_decay=float(group["weight_decay"]),
            eps=float(group["eps"]),
            amsgrad=group["amsgrad"],
            maximize=group["maximize"],
            grad_scale=scale,
            found_inf=found_inf,
        )
        if found_inf is not None:  # it counts no step where there was none
            torch._foreach_sub_(steps, [found_inf.view(())] * len(steps))

    def _call(
        self,
        grads: Sequence[Tensor],
        group: dict[str, Any],
        scale: Tensor | None,
        found_inf: Tensor | None,
        fused: bool,
    ) -> None:
        beta1, beta2 = group["betas"]
        placed = [as_placed(self._owners[k], grads[i]) for k, i in enumerate(self._places)]
        adamw(
            self._params,
            [grad.to(param.dtype) for grad, param in zip(placed, self._params, strict=True)],
            self._moments[0],
            self._moments[1],
            self._moments[2] if group["amsgrad"] else [],
            self._steps,
            foreach=group.get("foreach") if self._fused else False,
            fused=fused,
            capturable=group.get("capturable", False),
            grad_scale=scale,
            found_inf=found_inf,
            amsgrad=group["amsgrad"],
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )


def alike(entries: Sequence[Entry], places: Sequence[int]) -> list[Alike]:
    """Sort parameters, given by their places among the entries, into such calls."""
    kinds: dict[Any, list[int]] = {}
    for i in places:
        here = local(entries[i].param)
        kinds.setdefault((entries[i].group, here.device, here.dtype, is_dense(here)), []).append(i)
    return [Alike(entries, some) for some in kinds.values()]
