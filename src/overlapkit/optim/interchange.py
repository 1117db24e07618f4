"""States as torch.optim.AdamW has them, and back. Nothing is cast to the parameter's dtype on the way.

torch's `load_state_dict` casts floating state to the parameter's dtype (pytorch#43706), which would round
fp32 moments of bf16 parameters. int8 moments leave as fp32 and come back as the same codes.
"""

from typing import Any

import torch
from torch import Tensor

from overlapkit.optim import plain, rounding
from overlapkit.optim.columns import INT8
from overlapkit.optim.state import Form, as_sharded, local, parts, row_of

OURS = {"compensation", "remainder", "exp_avg_scale", "exp_avg_sq_scale"}
"""Names that torch's state does not have."""


class Held:
    """A tensor that torch's `load_state_dict` passes on as it is, since it does not see it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def held(state: dict[Any, Any]) -> dict[Any, Any]:
    """The states of a state_dict with all their tensors held."""
    return {
        key: {name: Held(x) if isinstance(x, Tensor) else x for name, x in values.items()}
        if isinstance(values, dict)
        else values
        for key, values in state.items()
    }


def released(values: Any) -> Any:
    """One parameter's state without the holders; what is no parameter's state as it is."""
    if not isinstance(values, dict):
        return values
    return {name: x.tensor if isinstance(x, Held) else x for name, x in values.items()}


def exported(param: Tensor, form: Form, state: dict[str, Any]) -> dict[str, Any]:
    """A parameter's state in torch's form: int8 moments as fp32, everything else as it is."""
    if form.moments != INT8 or not state:
        return state
    kept = {name: x for name, x in state.items() if name not in ("exp_avg_scale", "exp_avg_sq_scale")}
    for name, value in (("exp_avg", rounding.signed_value), ("exp_avg_sq", rounding.unsigned_value)):
        n_cols, codes = row_of(param), local(state[name])
        blocks = plain.in_blocks(codes.reshape(-1), n_cols)
        numbers = value(blocks, local(state[f"{name}_scale"]).unsqueeze(-1))
        flat = plain.out_of_blocks(numbers, n_cols)
        kept[name] = as_sharded(flat.view(codes.shape), param, parts(param, form)[0])
    return kept


def check(param: Tensor, form: Form, saved: dict[str, Any]) -> None:
    """Refuse a saved state that `load` cannot take.

    Raises:
        ValueError: A tensor is missing, of another shape, or not sharded where the parameter is.
    """
    if saved.get("step") is None:  # a step counted from 0 again would make the next updates far too large
        raise ValueError(
            f"state_dict has no 'step' for a parameter of shape {tuple(param.shape)}, nor has its group: it "
            "is not that of an AdamW"
        )
    for name in _sources(form, saved).values():
        value = _whole(param, saved, name)
        if local(value) is value and local(param) is not param:
            raise ValueError(
                f"state_dict has a plain tensor for a parameter of shape {tuple(param.shape)} that is "
                "sharded: load it through torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
            )


@torch.no_grad()
def load(param: Tensor, form: Form, state: dict[str, Any], saved: dict[str, Any]) -> None:
    """Put a saved state into the tensors of a parameter's state, converting moments to their dtypes.

    Args:
        param: The parameter.
        form: How its state is kept.
        state: Its state, all parts there.
        saved: What torch.optim.AdamW or this package's AdamW saved of it, checked.
    """
    step = saved["step"]
    state["step"].copy_(
        step.reshape(()) if isinstance(step, Tensor) else torch.tensor(float(step), device="cpu")
    )
    if form.moments == INT8:
        m, v = (_moment(param, saved[name]) for name in ("exp_avg", "exp_avg_sq"))
        kept = {part.name: local(state[part.name]) for part in parts(param, form)}
        flat = {name: x if name.endswith("scale") else x.view(-1) for name, x in kept.items()}
        plain.encode(flat, m.reshape(-1), v.reshape(-1), row_of(param), None)
    else:
        for name, source in _sources(form, saved).items():
            _copy(state[name], saved[source])
    for name, dtype in (("remainder", torch.float16), ("compensation", torch.bfloat16)):
        if name in state:
            value = saved.get(name)
            if (
                isinstance(value, Tensor) and value.dtype == dtype
            ):  # torch would have cast it: then it is stale
                _copy(state[name], _whole(param, saved, name))
            else:
                local(state[name]).zero_()


def _sources(form: Form, saved: dict[str, Any]) -> dict[str, str]:
    """For each moment the name under which it was saved."""
    largest = {"max_exp_avg_sq": "max_exp_avg_sq" if "max_exp_avg_sq" in saved else "exp_avg_sq"}
    return {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"} | (largest if form.amsgrad else {})


def _moment(param: Tensor, saved: Tensor) -> Tensor:
    """This rank's part of a moment, fp32 and row-major."""
    like = torch.empty_like(param, dtype=torch.float32, memory_format=torch.contiguous_format)
    _copy(like, saved)
    return local(like)


def _copy(there: Tensor, value: Tensor) -> None:
    a: Any = there
    b: Any = value
    if local(value) is not value and local(there) is not there and a.placements == b.placements:
        local(there).copy_(local(value))
    elif local(value) is not value and local(there) is there:
        there.copy_(b.full_tensor())
    else:
        there.copy_(value)


def _whole(param: Tensor, saved: dict[str, Any], name: str) -> Tensor:
    value = saved.get(name)
    if not isinstance(value, Tensor):
        raise ValueError(
            f"state_dict has no tensor {name!r} for a parameter of shape {tuple(param.shape)}: it is not "
            "that of an AdamW"
        )
    if value.shape != param.shape:
        raise ValueError(
            f"state_dict has {name!r} of shape {tuple(value.shape)} for a parameter of shape "
            f"{tuple(param.shape)}: its groups hold other parameters, or in another order"
        )
    return value
