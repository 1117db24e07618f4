"""AdamW in one launch, with its state made at construction and clipping inside the step.

The update is Loshchilov & Hutter, "Decoupled Weight Decay Regularization" (2019); docs/optim.md has the
forms in which bf16 parameters and moments are kept. state_dicts are torch.optim.AdamW's, both ways.
"""

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import Optimizer, ParamsT

from overlapkit.device import rank_and_world
from overlapkit.optim.arguments import (
    as_list,
    check_form,
    check_group,
    check_how,
    check_options,
    check_precision,
)
from overlapkit.optim.gradients import check_dense
from overlapkit.optim.interchange import OURS, check, exported, held, load, released
from overlapkit.optim.place import place_of
from overlapkit.optim.state import Form, at_random, fits, form_of, is_dense, local, make, nbytes, parts
from overlapkit.optim.table import Entry, Table
from overlapkit.optim.updating import Updater
from overlapkit.options import named_options

_HOW = ("foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay")
"""How this optimizer computes: never taken from a checkpoint, torch.optim.Adam's included."""


class AdamW(Optimizer):
    """torch.optim.AdamW's drop-in: the same arguments, results and state_dict.

    On a GPU a step is one launch for all parameters of all groups and dtypes, and one more that reads the
    gradients where they are clipped; nothing waits for the host. On the CPU fp32 parameters are updated by
    torch's fused kernel. The state exists from construction on, in one allocation a group and dtype.

    Args:
        params: Parameters, named parameters or parameter groups: fp32, fp64 and bf16, also mixed.
        lr: Learning rate, a float or a one-element tensor, which is read on its device.
        betas: Decay rates of the two moments, in [0, 1), floats or one-element tensors.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay.
        amsgrad: Divide by the largest second moment seen so far.
        maximize: Ascend instead of descend.
        max_norm: Clip gradients to this global 2-norm, over all groups; None does not clip. The kernel
            leaves the gradients as they are; other ways of computing change them in place, as torch does.
        precision: How bf16 parameters are updated: "bf16_master" (what None means), an fp32 master kept as
            the parameter and 16 bits beside it; "bf16_kahan", what rounding loses is kept in bf16;
            "bf16_sr", rounded stochastically, with nothing beside it. "fp32": there are none.
        moments: "fp32"; "bf16", rounded stochastically; "int8", blocks of 128 with a scale each, for
            parameters of at least two dimensions with rows of 64 and more, the others keep fp32.
        eager_state: Make the state at construction, for parameters that require a gradient.
        capturable: Needed where a CUDA graph captures steps, as in torch; CUDA only.
        foreach: As in torch: True computes with torch's foreach kernels.
        fused: As in torch: False computes with torch's own loop. None and True are the same.
        differentiable: Not supported; an error when set.

    Attributes:
        grad_norm: The global gradient norm of the last step before clipping, a 0-d tensor on the
            gradients' device, or None before the first step and without `max_norm`.

    Raises:
        ValueError: An argument is out of its range, does not go with another one or with the parameters,
            or there are no parameters.
        TypeError: An argument is of the wrong type.
        RuntimeError: WORLD_SIZE is set but there is no process group: the global norm would be wrong.
    """

    @named_options
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
        listed = as_list(params)
        fused = not foreach if fused is None else fused
        self.max_norm = max_norm
        self.grad_norm: Tensor | None = None
        self._precision, self._moments = precision, moments
        self._eager = eager_state
        self._step_supports_amp_scaling = fused  # torch's GradScaler then leaves unscaling to the kernel
        self._updater: Updater | None = None
        self._last: tuple[Any, ...] = ()
        self._ids: list[int] = []
        self._sharded = False
        self._graphs: list[Table] = []
        self._done: dict[torch.device, Tensor] = {}
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
        check_precision(self._parameters(), precision)
        self._export()

    @staticmethod
    def memory(
        params: ParamsT, *, precision: str | None = None, moments: str = "fp32", amsgrad: bool = False
    ) -> int:
        """Bytes of state that AdamW will allocate on this rank for parameters that require a gradient.

        Args:
            params: As AdamW takes them; meta parameters will do.
            precision: As AdamW takes it.
            moments: As AdamW takes it.
            amsgrad: As AdamW takes it; a group's own counts.
        """
        check_options(None, precision, moments, None, None, False)
        listed = as_list(params)
        groups = [e for e in listed if isinstance(e, dict)] or [{"params": listed}]
        total = 0
        for group in groups:
            given = group["params"]
            given = [given] if isinstance(given, Tensor) else given
            named = [p[1] if isinstance(p, tuple) else p for p in given]
            trained = [p for p in named if p.requires_grad]
            forms = [form_of(p, precision, moments, group.get("amsgrad", amsgrad)) for p in trained]
            total += nbytes(trained, forms)
        return total

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch, and make its state.

        Raises:
            ValueError: A parameter or an option of the group is not allowed.
            TypeError: It is no dict with "params", or an option is of the wrong type.
            NotImplementedError: A parameter is sharded in a way that rounding at random does not know.
        """
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise TypeError(f"params has a group {param_group!r}: give a dict with 'params'")
        param_group.update(self._how(param_group))
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_group(group)
            if self._precision == "fp32":
                check_precision(group["params"], self._precision)
            for param in group["params"]:
                self._check(param, group)
        except Exception:
            self.param_groups.pop()  # a refused group leaves the optimizer as it was
            raise
        if not (group["fused"] and all(is_dense(local(param)) for param in group["params"])):
            self._step_supports_amp_scaling = False  # torch's own loops know no scale: GradScaler unscales
        self._forget()
        if self._eager:
            self._make_states(group)

    def _how(self, group: dict[str, Any]) -> dict[str, Any]:
        """How a group computes, `foreach` and `fused`: its own choice if it makes one."""
        foreach, fused = group.get("foreach"), group.get("fused")
        check_how(foreach, fused)
        if foreach is None and fused is None:
            return {name: self.defaults[name] for name in ("foreach", "fused")}
        return {"foreach": foreach, "fused": not foreach if fused is None else fused}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what this class or torch.optim.AdamW (plain, foreach or fused) saved.

        How the update is computed (foreach, fused, ...) stays as this optimizer was built, and so do
        the dtypes of its state; parameters without saved state start from zero.

        Raises:
            ValueError: It is not an optimizer's state, or its groups or tensors do not fit. All is as before.
        """
        if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= state_dict.keys():
            raise ValueError("state_dict has no 'state' and 'param_groups': give what state_dict() returned")
        own = self.param_groups
        before = dict(self.state)
        groups = [
            {
                **{k: v for k, v in self.defaults.items() if k not in saved},
                **saved,
                **{key: group[key] for key in _HOW},
            }
            for saved, group in zip(state_dict["param_groups"], own, strict=False)
        ]
        rest = state_dict["param_groups"][len(groups) :]  # torch reports the mismatch
        # the hooks of others see plain tensors: ours runs after theirs before, and before theirs after
        hold = self.register_load_state_dict_pre_hook(
            lambda _, given: {**given, "state": held(given["state"])}
        )
        release = self.register_load_state_dict_post_hook(lambda _: self._take(before, own), prepend=True)
        try:
            super().load_state_dict({**state_dict, "param_groups": [*groups, *rest]})
        finally:
            hold.remove()
            release.remove()

    def _take(self, before: dict[Tensor, Any], own: list[dict[str, Any]]) -> None:
        """Put what torch has just loaded into the states that were there before, or into new ones."""
        loaded = {param: released(values) for param, values in self.state.items()}
        try:
            for group in self.param_groups:
                step = group.pop("step", None)  # apex's place
                for param in group["params"]:
                    if saved := loaded.get(param):
                        loaded[param] = saved = saved if step is None else {"step": step, **saved}
                        check(param, self._form(param, group), saved)
        except Exception:  # of many parameters the last one may not fit
            self.param_groups = own
            self.state.clear()
            self.state.update(before)
            raise
        self.state.clear()
        self.state.update({param: values for param, values in before.items() if values})
        self._forget()
        for group in self.param_groups:
            for param in group["params"]:
                saved = loaded.pop(param, None)
                if saved:
                    form = self._form(param, group)
                    if not fits(self.state.get(param), param, form):
                        self.state.pop(param, None)
                        self._make_states(group, [param])
                    load(param, form, self.state[param], saved)
                    known = {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", *OURS}
                    self.state[param].update({k: v for k, v in saved.items() if k not in known})
                elif param in self.state:
                    for value in self.state[param].values():
                        if isinstance(value, Tensor):
                            local(value).zero_()
        if self._eager:
            for group in self.param_groups:
                self._make_states(group)
        self.state.update(loaded)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @_disable_dynamo  # no graph can hold it; torch's own optimizers do so, without importing the compiler
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the parameters that have a gradient.

        Args:
            closure: Re-evaluates the model and returns the loss, which is returned.

        Raises:
            RuntimeError: A gradient is sparse, or the model was moved or converted after its first step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = self._parameters()
        gradients = [param.grad for param in params]
        grads = [grad for grad in gradients if grad is not None]
        if len(grads) == len(params):
            with_grad = params
        else:
            with_grad = [p for p, g in zip(params, gradients, strict=True) if g is not None]
        if self._updater is None or self._seen(with_grad) != self._last:
            self._updater = self._plan(params, with_grad)
            self._last = self._seen(with_grad)
        self._check_capture(params)
        check_dense(grads)
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        norm = self._updater.step(grads, self.param_groups, self.max_norm, scale, found_inf, self._done)
        self.grad_norm = norm if self.max_norm is not None else None
        return loss

    def _parameters(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _seen(self, with_grad: list[Tensor]) -> tuple[Any, ...]:
        """What the plan of a step was made for. Groups may be edited, models moved, states replaced.

        Runs in every step: for plain tensors about half a microsecond each. What was planned for is alive as
        long as the plan is, so that nothing else gets one of its addresses.
        """
        ids = list(map(id, with_grad))
        if ids != self._ids:
            self._ids, self._sharded = ids, any(local(param) is not param for param in with_grad)
        states = (state for state in self.state.values() if isinstance(state, dict))
        tensors = with_grad + [x for state in states for x in state.values() if isinstance(x, Tensor)]
        return (
            ids,
            [x.data_ptr() for x in (map(local, tensors) if self._sharded else tensors)],
            [(group["amsgrad"], len(group["params"])) for group in self.param_groups],
        )

    def _plan(self, params: list[Tensor], with_grad: list[Tensor]) -> Updater:
        place = {id(param): number for number, param in enumerate(params)}
        has_grad = set(map(id, with_grad))
        entries = []
        for index, group in enumerate(self.param_groups):
            for param in group["params"]:
                if id(param) in has_grad:
                    self._ready(param, group)
                    form = self._form(param, group)
                    entries.append(Entry(param, form, self.state[param], index, place[id(param)]))
        return Updater(entries, self.param_groups, self._graphs)

    def _check_capture(self, params: list[Tensor]) -> None:
        capturable = all(group["capturable"] for group in self.param_groups)
        if params and params[0].is_cuda and not capturable and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a CUDA graph captures this step: make AdamW with capturable=True")

    def _form(self, param: Tensor, group: dict[str, Any]) -> Form:
        return form_of(param, self._precision, self._moments, group["amsgrad"])

    def _check(self, param: Tensor, group: dict[str, Any]) -> Form:
        form = self._form(param, group)
        check_form(param, form, group["foreach"], group["fused"])
        if at_random(form):
            place_of(param)
        return form

    def _make_states(self, group: dict[str, Any], params: list[Tensor] | None = None) -> None:
        """Make the states that are not there, one allocation for each device and dtype."""
        missing: dict[torch.device, list[Tensor]] = {}
        for param in group["params"] if params is None else params:
            wanted = params is not None or param.requires_grad
            if wanted and not param.is_meta and not self.state[param]:
                missing.setdefault(local(param).device, []).append(param)
        for some in missing.values():
            forms = [self._check(param, group) for param in some]
            states = make(some, forms, None if group["capturable"] or group["fused"] else "cpu")
            for param, state in zip(some, states, strict=True):
                self.state[param] = state

    def _ready(self, param: Tensor, group: dict[str, Any]) -> None:
        """Make the state where there is none, or where the model was converted since it was made."""
        form = self._form(param, group)
        if fits(self.state.get(param), param, form):
            return
        state = self.state[param]
        if not float(state.get("step", 0.0)):  # made ahead, and the model converted before its first step
            state.clear()
            self._make_states(group, [param])
        elif group["amsgrad"] and "max_exp_avg_sq" not in state and len(parts(param, form)) == len(state):
            fresh = make([param], [form], None)[0]["max_exp_avg_sq"]
            state["max_exp_avg_sq"] = fresh
        else:
            raise RuntimeError(
                f"a parameter is {param.dtype} {tuple(param.shape)} on {param.device} and its state is not: "
                "move and convert a model before its first step, or make a new optimizer"
            )

    def _forget(self) -> None:
        """Plan anew at the next step."""
        self._updater, self._last, self._ids = None, (), []

    def _export(self) -> None:
        """int8 moments leave `state_dict()` as fp32; without them it is torch's own."""
        if self._moments == "int8":
            self.register_state_dict_post_hook(_in_torchs_form, prepend=True)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle keeps; torch's own list leaves out what is ours."""
        ours = ("max_norm", "grad_norm", "_eager", "_step_supports_amp_scaling", "_precision", "_moments")
        kept = {name: getattr(self, name) for name in ours}
        return {**super().__getstate__(), **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()
        self._sharded = False
        if "_moments" in state:  # a copy, which has no hooks yet; load_state_dict comes here, too
            self._graphs, self._done = [], {}
            self._export()


def _in_torchs_form(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A post-hook of state_dict()."""
    assert isinstance(optimizer, AdamW)
    numbers = (n for group in state_dict["param_groups"] for n in group["params"])
    owners = [(group, param) for group in optimizer.param_groups for param in group["params"]]
    state = dict(state_dict["state"])
    for number, (group, param) in zip(numbers, owners, strict=True):
        if number in state:
            state[number] = exported(param, optimizer._form(param, group), state[number])
    return {**state_dict, "state": state}
