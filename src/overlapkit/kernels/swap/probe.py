"""Finds what a module computes: candidates by its structure, and of these the one that gives its numbers.

The numbers are those of the instance's own forward, with its own settings, over small stand-ins for its
weights on the CPU, in float64 where it can. So a probe takes milliseconds, tells the forms of gelu apart,
and needs neither the module's memory nor its device: sharded modules and those on the meta device do, too.
"""

import copy
import inspect
import warnings
from collections.abc import Iterator
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from overlapkit.kernels.swap.fused import Gated, Norm

TOLERANCE = 1e-5
"""Largest difference, relative to a row's largest: many a norm computes in float32 whatever it gets."""

_EPS = ("eps", "variance_epsilon", "epsilon")


def candidates(module: nn.Module) -> list[Norm] | list[Gated]:
    """What the module may compute by its parameters, children and attributes; empty if it is none of ours."""
    kinds = (k for k in type(module).__mro__ if not k.__module__.startswith("torch.distributed."))  # FSDP2's
    of_torch = next(kinds).__module__.startswith("torch.")  # what such a module computes is known
    if of_torch or module._buffers or isinstance(module, torch.jit.ScriptModule):
        return []
    tensors = [name for name, p in module._parameters.items() if p is not None]
    if not module._modules:
        return _norms(module, tensors)
    return [] if tensors else list(_gated(module))


def _norms(module: nn.Module, tensors: list[str]) -> list[Norm]:
    eps = next((name for name in _EPS if type(vars(module).get(name, "")) in (float, type(None))), None)
    if eps is None or any(module._parameters[name].dim() != 1 for name in tensors):  # type: ignore[union-attr]
        return []
    if tensors == ["weight", "bias"]:
        return [Norm(eps, centred=True, bias=True)]
    if tensors == ["weight"]:
        return [Norm(eps), Norm(eps, offset=1.0), Norm(eps, centred=True)]
    named_so = not tensors and "norm" in type(module).__name__.lower()
    return [Norm(eps), Norm(eps, centred=True)] if named_so else []


def _gated(module: nn.Module) -> Iterator[Gated]:
    sizes = _linears(module)
    rest = [child for name, child in module._modules.items() if child is not None and name not in sizes]
    if any(True for child in rest for _ in (*child.parameters(), *child.buffers())):
        return
    activations = ("silu", "gelu", "gelu_tanh")
    if len(sizes) == 3:
        for gate, up, down in permutations(sizes):
            if sizes[gate] == sizes[up] and sizes[down][0] == sizes[gate][1]:
                yield from (Gated(gate, up, down, activation) for activation in activations)
    if len(sizes) == 2:
        for gate, down in permutations(sizes):
            if sizes[gate][1] == 2 * sizes[down][0]:
                for order in ("gate_up", "up_gate"):
                    yield from (Gated(gate, None, down, activation, order) for activation in activations)


def _linears(module: nn.Module) -> dict[str, tuple[int, int]]:
    """In and out features of the children that have them: nn.Linear, and what stands in for it."""
    found = {}
    for name, child in module._modules.items():
        size = getattr(child, "in_features", None), getattr(child, "out_features", None)
        if type(size[0]) is type(size[1]) is int:
            found[name] = size
    return found  # type: ignore[return-value]


def choose(module: nn.Module, found: list[Norm] | list[Gated]) -> Norm | Gated | str:
    """The candidate that gives the module's numbers, or why there is none."""
    if (n := len(inspect.signature(type(module).forward).parameters)) != 2:
        return f"its forward takes {n - 1} arguments, where a kernel for it takes one"
    if hooked := [
        name for name, child in module._modules.items() if name not in _linears(module) and _hooks(child)
    ]:
        return f"{hooked[0]!r} in it has hooks, which the fused forward would not call"
    norm = isinstance(found[0], Norm)
    dtypes = (torch.float64, torch.float32) if norm else (torch.float64,)  # some norms convert x alone
    smallest, failure = float("inf"), None
    with torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of dtypes that torch has no fused form for
        torch.default_generator.manual_seed(0)  # torch.manual_seed would seed GPUs, too
        for how, dtype in [(how, dtype) for how in found for dtype in dtypes]:
            try:
                difference = max(_differences(module, how, dtype))
                if difference <= TOLERANCE:
                    return how._replace(promotes=_promotes(module, how)) if isinstance(how, Norm) else how
                smallest = min(smallest, difference)
            except Exception as error:  # foreign code, on sizes that it was perhaps not made for
                failure = failure or f"{type(error).__name__}: {error}"
    if smallest == float("inf") and failure:
        return f"its forward could not be probed: {failure}"
    what = "an RMSNorm's or a LayerNorm's" if norm else "silu's or gelu's, gated"
    return f"its numbers are not {what}: they differ by {smallest:.1e} of a row's largest"


def _hooks(child: nn.Module | None) -> bool:
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(child, name, None) for name in names)


def _differences(module: nn.Module, how: Norm | Gated, dtype: torch.dtype) -> Iterator[float]:
    """How far `how` is from the module's own forward, in training and in evaluation."""
    twin, x = _twin(module, how, dtype)
    ours = how(twin, x)
    for training in (True, False):
        own = type(module).forward(twin.train(training), x)
        if not isinstance(own, Tensor) or own.shape != ours.shape:
            yield float("inf")
            return
        size = ours.abs().amax(-1, keepdim=True) + torch.finfo(dtype).tiny
        difference = ((own.double() - ours) / size).abs().max().item()
        yield difference if difference == difference else float("inf")


def _promotes(module: nn.Module, how: Norm) -> bool:
    """Whether a norm of bfloat16 with a float32 weight is float32."""
    twin, x = _twin(module, how, torch.float32)
    try:
        return bool(type(module).forward(twin, x.bfloat16()).dtype == torch.float32)
    except RuntimeError:  # it does not take two dtypes
        return False


def _twin(module: nn.Module, how: Norm | Gated, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    """A copy of the instance with stand-ins for all that has weights, and an input for it."""
    twin: Any = object.__new__(type(module))
    vars(twin).update(vars(module))
    place: dict[str, Any] = {"dtype": dtype, "device": "cpu"}
    if isinstance(how, Norm):
        weight = module._parameters.get("weight")
        width = 64 if weight is None else weight.shape[0]
        vars(twin)["_parameters"] = {
            name: None if p is None else nn.Parameter(torch.randn(width, **place))
            for name, p in module._parameters.items()
        }
    else:
        width, hidden = 16, 24
        sizes = {how.gate: (width, hidden if how.up else 2 * hidden), how.down: (hidden, width)}
        sizes |= {how.up: (width, hidden)} if how.up else {}
        vars(twin)["_modules"] = {
            name: nn.Linear(*sizes[name], **place) if name in sizes else copy.deepcopy(child)
            for name, child in module._modules.items()
        }
    # rows as small as eps, and large enough to show a clip; a mean, which a LayerNorm would take out
    scale = torch.tensor([1e-3, 0.1, 1.0, 3.0, 30.0], **place)[:, None]
    return twin, scale * (torch.randn(2, 5, width, **place) + 0.5)
