"""AdamW with its state made at construction and clipping inside the step.

The update is Loshchilov & Hutter, "Decoupled Weight Decay Regularization" (2019), computed by torch's
fused kernel on CPU and CUDA; state_dicts are interchangeable with torch.optim.AdamW both ways.
"""

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import Optimizer, ParamsT

from overlapkit.device import rank_and_world
from overlapkit.optim.arguments import check_group, check_options
from overlapkit.optim.clip import clip_by_global_norm_, global_norm

_HOW = ("foreach", "fused", "capturable")  # how this process computes: never taken from a checkpoint


class AdamW(Optimizer):
    """torch.optim.AdamW's drop-in: the same arguments, results and state_dict.

    What it adds: `max_norm` clips by the global norm inside `step()`, with no host synchronisation and
    over DTensors on any mixture of meshes; `grad_norm` is that norm; and the state exists from
    construction on, so the first step allocates nothing that later steps do not.

    Args:
        params: Parameters, named parameters or parameter groups. Floating point, not half precision:
            keep fp32 parameters and compute in bf16 (`shard(mp_policy="bf16")`, autocast).
        lr: Learning rate, a float or a one-element tensor.
        betas: Decay rates of the two moments, in [0, 1).
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay.
        amsgrad: Divide by the largest second moment seen so far.
        maximize: Ascend instead of descend.
        max_norm: Clip gradients to this global 2-norm, over all groups; None does not clip.
        precision: None or "fp32"; others are not available yet.
        moments: "fp32": moments have the parameters' dtype; others are not available yet.
        eager_state: Make the state at construction, for parameters that require a gradient.
        capturable: As in torch; CUDA only.
        foreach: As in torch; the default is torch's fused kernel.
        fused: As in torch; None means fused unless `foreach` is set.
        differentiable: Not supported; an error when set.

    Attributes:
        grad_norm: The global gradient norm of the last step before clipping, a 0-d tensor on the
            gradients' device, or None before the first step and without `max_norm`.

    Raises:
        ValueError: An argument is out of its range, or there are no parameters.
        NotImplementedError: `precision` or `moments` asks for what is not there yet, or a parameter is
            bf16 or fp16.
        RuntimeError: WORLD_SIZE is set but there is no process group: the global norm would be wrong.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        max_norm: float | None = None,
        precision: str | None = None,
        moments: str = "fp32",
        eager_state: bool = True,
        capturable: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        differentiable: bool = False,
    ) -> None:
        check_options(max_norm, precision, moments, foreach, fused, differentiable)
        rank_and_world()
        if isinstance(params, Tensor | torch.nn.Module) or not isinstance(params, Iterable):
            raise TypeError(f"params is a {type(params).__name__}: give parameters, e.g. model.parameters()")
        listed: Any = list(params)
        if not any(
            entry["params"] if isinstance(entry, dict) and "params" in entry else True for entry in listed
        ):
            raise ValueError("params is empty: give model.parameters() of a model that has some")
        fused = not foreach if fused is None else fused
        self.max_norm = max_norm
        self.grad_norm: Tensor | None = None
        self._eager = eager_state
        self._unused: set[Tensor] = set()  # parameters whose state was made ahead and has not been used yet
        self._step_supports_amp_scaling = fused  # torch's GradScaler then leaves unscaling to the kernel
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": False,
            "fused": fused,
            "decoupled_weight_decay": True,  # torch.optim.AdamW writes and expects it
        }
        super().__init__(listed, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch, and make its state.

        Raises:
            NotImplementedError: A parameter is bf16 or fp16.
            ValueError: A parameter is not floating point, or an option of the group is out of range.
            TypeError: It is no dict with "params", or an option is of the wrong type.
        """
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise TypeError(f"params has a group {param_group!r}: give a dict with 'params'")
        super().add_param_group(param_group)
        try:
            check_group(self.param_groups[-1])
        except Exception:
            self.param_groups.pop()  # a refused group leaves the optimizer as it was
            raise
        if self._eager:
            self._make_state(self.param_groups[-1])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what this class or torch.optim.AdamW (plain, foreach or fused) saved.

        How the update is computed (foreach, fused, capturable) stays as this optimizer was built;
        parameters without saved state start from zero.

        Raises:
            ValueError: It is not an optimizer's state, or its groups do not fit.
        """
        if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= state_dict.keys():
            raise ValueError("state_dict has no 'state' and 'param_groups': give what state_dict() returned")
        own = self.param_groups
        groups = [
            {**saved, **{key: group[key] for key in _HOW}}
            for saved, group in zip(state_dict["param_groups"], own, strict=False)
        ]
        rest = state_dict["param_groups"][len(groups) :]  # torch reports the mismatch
        super().load_state_dict({**state_dict, "param_groups": [*groups, *rest]})
        self._unused.clear()
        for param, state in self.state.items():
            for key, moment in state.items():
                if key != "step":
                    state[key] = _in_layout_of(param, moment)
        if self._eager:
            for group in self.param_groups:
                self._make_state(group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the parameters that have a gradient.

        Args:
            closure: Re-evaluates the model and returns the loss, which is returned.

        Raises:
            RuntimeError: A gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.max_norm is not None:
            self._clip(self.max_norm)
        for group in self.param_groups:
            self._update(group)
        return loss

    def _clip(self, max_norm: float) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = global_norm(grads)
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if scale is not None:  # GradScaler's gradients are still scaled here; the kernel unscales them
            norm = norm / scale
        clip_by_global_norm_(grads, max_norm, norm)
        self.grad_norm = norm

    def _update(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        if any(p.grad.is_sparse for p in params):
            raise RuntimeError("AdamW does not support sparse gradients: use torch.optim.SparseAdam")
        for param in params:
            self._ready(param, group)
        # one operator takes no mixture of the two, which shard(ignored=...) leaves behind
        for sharded in (False, True):
            part = [p for p in params if hasattr(p, "to_local") is sharded]
            if part:
                self._update_alike(part, group)

    def _update_alike(self, params: list[Tensor], group: dict[str, Any]) -> None:
        states = [self.state[p] for p in params]
        beta1, beta2 = group["betas"]
        adamw(
            params,
            [_in_layout_of(p, p.grad) for p in params if p.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
            [state["step"] for state in states],
            foreach=group["foreach"],
            capturable=group["capturable"],
            fused=group["fused"],
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            amsgrad=group["amsgrad"],
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )

    def _make_state(self, group: dict[str, Any]) -> None:
        for param in group["params"]:
            if param.requires_grad and not param.is_meta and not self.state[param]:
                self.state[param] = _zeros(param, group)
                self._unused.add(param)

    def _ready(self, param: Tensor, group: dict[str, Any]) -> None:
        """Make the state where there is none, or where the model was moved or converted since it was made."""
        state = self.state[param]
        if param in self._unused:
            self._unused.remove(param)
            moment = state["exp_avg"]
            if (moment.device, moment.dtype, moment.stride()) != (param.device, param.dtype, param.stride()):
                state.clear()
        if not state:
            state.update(_zeros(param, group))

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle keeps; torch's own list leaves out what is ours."""
        ours = ("max_norm", "grad_norm", "_eager", "_step_supports_amp_scaling")
        kept = {name: getattr(self, name) for name in ours}
        return {**super().__getstate__(), **kept, "_unused": set()}


def _zeros(param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
    """One parameter's state before its first step, as torch.optim.AdamW makes it."""
    on_device = group["capturable"] or group["fused"]
    state = {
        "step": torch.zeros((), dtype=torch.float32, device=param.device if on_device else "cpu"),
        "exp_avg": torch.zeros_like(param, memory_format=torch.preserve_format, requires_grad=False),
        "exp_avg_sq": torch.zeros_like(param, memory_format=torch.preserve_format, requires_grad=False),
    }
    if group["amsgrad"]:
        state["max_exp_avg_sq"] = torch.zeros_like(state["exp_avg"])
    return state


def _in_layout_of(param: Tensor, grad: Tensor) -> Tensor:
    """The gradient with the parameter's strides: torch's fused kernel walks both as flat memory."""
    if grad.stride() == param.stride():
        return grad
    return torch.empty_like(param, dtype=grad.dtype, memory_format=torch.preserve_format).copy_(grad)
