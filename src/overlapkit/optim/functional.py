"""AdamW as a function of parameters, gradients and states: what the class does, without its bookkeeping."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from overlapkit.optim.arguments import check_form, check_group, check_options, check_precision
from overlapkit.optim.gradients import check_dense
from overlapkit.optim.state import fits, form_of, make
from overlapkit.optim.table import Entry
from overlapkit.optim.updating import Updater


def adamw_state(
    params: Sequence[Tensor], *, precision: str | None = None, moments: str = "fp32", amsgrad: bool = False
) -> list[dict[str, Tensor]]:
    """The states of parameters on one device before their first step, in one allocation a dtype.

    Args:
        params: fp32, fp64 and bf16 tensors, DTensors or plain.
        precision: As `AdamW` takes it.
        moments: As `AdamW` takes it.
        amsgrad: Whether the largest second moment is kept.

    Returns:
        For each parameter a dict: "step" (fp32, ()), "exp_avg", "exp_avg_sq" and what its form adds.
    """
    forms = [form_of(param, precision, moments, amsgrad) for param in params]
    return make(params, forms, None) if params else []


def adamw(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[dict[str, Tensor]],
    *,
    lr: float | Tensor = 1e-3,
    betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    amsgrad: bool = False,
    maximize: bool = False,
    max_norm: float | None = None,
    precision: str | None = None,
    moments: str = "fp32",
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> Tensor | None:
    """One AdamW step of all parameters, in place.

    Builds its table anew at each call: for a training loop take `AdamW`, which keeps it.

    Args:
        params: As for `adamw_state`.
        grads: For each its gradient: any strides, any floating dtype.
        states: For each its state, as `adamw_state` made it with the same options.
        lr: See `AdamW`, for this and the next arguments.
        betas: The decay rates of the moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay.
        amsgrad: Divide by the largest second moment.
        maximize: Ascend.
        max_norm: Clip to this global norm; None does not clip.
        precision: How bf16 parameters are kept.
        moments: How moments are kept.
        grad_scale: What gradients are divided by first, fp32, one element, or None.
        found_inf: fp32, one element: nothing is changed where it is not zero. Or None.

    Returns:
        The global norm of the gradients before clipping, fp32 (); None without `max_norm`.

    Raises:
        ValueError: An argument is out of its range, the lists are not equally long, or a state does not fit.
        RuntimeError: A gradient is sparse.
    """
    if not len(params) == len(grads) == len(states):
        raise ValueError(
            f"params, grads and states have {len(params)}, {len(grads)} and {len(states)} entries: give one "
            "gradient and one state for each parameter"
        )
    check_options(max_norm, precision, moments, None, None, False)
    group: dict[str, Any] = {"params": list(params), "lr": lr, "betas": betas, "eps": eps}
    group |= {"weight_decay": weight_decay, "amsgrad": amsgrad, "maximize": maximize, "capturable": False}
    group |= {"fused": True}
    check_group(group)
    check_precision(list(params), precision)
    check_dense(grads)
    entries = []
    for number, (param, state) in enumerate(zip(params, states, strict=True)):
        form = form_of(param, precision, moments, amsgrad)
        check_form(param, form, None, None)
        if not fits(state, param, form):
            raise ValueError(
                f"states[{number}] holds {sorted(state)}, which is not what a {param.dtype} parameter of "
                f"shape {tuple(param.shape)} keeps: make it by adamw_state with the same options"
            )
        entries.append(Entry(param, form, state, 0, number))
    return Updater(entries, [group], []).step(grads, [group], max_norm, grad_scale, found_inf, {})
