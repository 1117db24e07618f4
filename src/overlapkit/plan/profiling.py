"""`profile`: runs a model alone for some steps and measures what each of its units costs.

Forward is cut where a unit's call begins and ends. Backward is cut where it reaches the output of a unit:
what lies between two such moments belongs to the unit whose output was reached, so the parts add up.
"""

import contextlib
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from overlapkit.measure.clock import Clock, clock_of
from overlapkit.parallel.structure import find_structure
from overlapkit.parallel.units import ROOT, Unit, resolve_units
from overlapkit.plan.arguments import check_ranks
from overlapkit.plan.costs import Profile, UnitProfile, fingerprint

Loss = Callable[[Any, Any], Tensor]


def profile(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    units: Any = "auto",
    tokens: int | None = None,
    steps: int = 5,
) -> Profile:
    """Measure forward, backward, parameters and activations of each unit, on this process alone.

    Call it before `shard` or `replicate`, with the microbatch that a rank will train on. Two steps are run to
    warm up and `steps` are measured; figures are their medians. Buffers, gradients and random generators are
    afterwards what they were; parameters are not touched.

    Args:
        model: With parameters, on its device, in the mode (train or eval) that counts.
        batch: What the model is called with: a dict by keyword, a tuple or list by position, else alone.
        loss: Of the model's output and the batch; None where the model returns its loss.
        units: As for `shard`; measured one by one, so leave small blocks apart: `choose` merges them.
        tokens: Tokens (or samples) of the batch, for tokens a second and the break-even.
        steps: How many are measured.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: The model is on the meta device, sharded, or gives no loss; or a number is out of range.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__}: profile takes a torch.nn.Module")
    check_ranks("steps", steps)
    if tokens is not None:
        check_ranks("tokens", tokens)
    parameters = list(model.parameters())
    if not parameters or any(parameter.is_meta for parameter in parameters):
        raise ValueError(
            "model has no parameters, or some on the meta device: profile runs it, on its device"
        )
    if any(hasattr(parameter, "full_tensor") for parameter in parameters):
        raise ValueError("model is sharded already: profile it before shard, as one rank would run it alone")
    resolved = resolve_units(model, units, "auto", set())
    probe = _Probe(resolved, clock_of(parameters[0].device))
    with _restored(model), probe.attached():
        for step in range(steps + 2):
            probe.begin(counted=step >= 2)
            value = _run(model, batch, loss)
            probe.turn_back()
            value.backward()
            probe.end()
    blocks = set(find_structure(model).blocks)
    return Profile(
        tuple(probe.unit(model, unit, blocks) for unit in resolved),
        tokens=tokens,
        model=fingerprint(model),
        device=str(parameters[0].device),
        source="measured",
    )


def _run(model: nn.Module, batch: Any, loss: Loss | None) -> Tensor:
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, tuple | list) else model(batch)
    value = output if loss is None else loss(output, batch)
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        what = "the model's output" if loss is None else "what loss= returned"
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"{what} ({shape}) is no loss that can be back-propagated: give loss=, a function of the output "
            "and the batch that returns one number with gradients"
        )
    return value


class _Probe:
    """Hooks on the units, and what they saw."""

    def __init__(self, units: list[Unit], clock: Clock) -> None:
        self._units = units
        self._clock = clock
        self._turns: list[tuple[str, str, Any]] = []  # phase, unit, mark
        self._open: list[str] = []
        self._counted = False
        self._back = False
        self._calls: dict[str, list[int]] = defaultdict(list)  # modules, in the order of their calls
        self._seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
        self._saved: dict[str, dict[int, int]] = defaultdict(dict)
        self._inputs: dict[str, dict[int, int]] = defaultdict(dict)
        self._own: set[int] = set()

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        hooks = []
        for unit in self._units:
            if unit.name == ROOT:
                self._own = {p.untyped_storage().data_ptr() for p in unit.modules[0].parameters()}
                continue
            for module in unit.modules:
                enter, leave = self._entering(unit.name), self._leaving(unit.name)
                hooks.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
                hooks.append(module.register_forward_hook(leave))
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def begin(self, *, counted: bool) -> None:
        """A step begins, in the root's forward."""
        self._counted = counted
        self._saved.clear()
        self._inputs.clear()
        self._turns.clear()
        self._open.clear()
        self._calls.clear()
        self._back = False
        self._turn("forward", ROOT)

    def turn_back(self) -> None:
        """Backward begins, in what the root does after the last unit."""
        self._back = True
        self._turn("backward", ROOT)

    def end(self) -> None:
        """Backward is over: time the step's turns."""
        self._turn("end", ROOT)
        times = [self._time(mark) for _, _, mark in self._turns]
        spent: dict[tuple[str, str], int] = defaultdict(int)
        for (phase, name, _), start, stop in zip(self._turns, times, times[1:], strict=False):
            spent[phase, name] += stop - start
        for _, _, mark in self._turns:
            self._clock.release(mark)
        if self._counted:
            for unit in self._units:
                for phase in ("forward", "backward"):
                    self._seconds[phase, unit.name].append(spent[phase, unit.name] / 1e9)

    def unit(self, model: nn.Module, unit: Unit, blocks: set[str]) -> UnitProfile:
        """What was measured of one unit."""
        parameters = list(unit.parameters.values())
        names = {id(module): name for name, module in model.named_modules()}
        modules = () if unit.name == ROOT else tuple(names[id(module)] for module in unit.modules)
        return UnitProfile(
            modules=modules,
            block=bool(modules) and set(modules) <= blocks,
            parameters=sum(parameter.numel() for parameter in parameters),
            gradients=tuple(parameter.numel() for parameter in parameters if parameter.requires_grad),
            nbytes=sum(parameter.nbytes for parameter in parameters),
            forward_s=statistics.median(self._seconds["forward", unit.name]),
            backward_s=statistics.median(self._seconds["backward", unit.name]),
            saved=sum(self._saved[unit.name].values()),
            inputs=sum(self._inputs[unit.name].values()),
            backward_needs=unit.regathers or not unit.reshard,
            calls=max(Counter(self._calls[unit.name]).values(), default=1),
        )

    def _time(self, mark: Any) -> int:
        while (time := self._clock.time(mark)) is None:
            torch.cuda.synchronize()  # a profile may wait: nothing trains meanwhile
        return time

    def _turn(self, phase: str, unit: str) -> None:
        now = self._clock.now()
        self._turns.append((phase, unit, self._clock.mark(now)))

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._back:  # recomputation, which is part of the backward that is under way
                return
            for tensor in _tensors((args, kwargs)):
                self._inputs[name][tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            self._calls[name].append(id(module))
            self._open.append(name)
            self._turn("forward", name)

        return enter

    def _leaving(self, name: str) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if self._back:
                return
            self._open.pop()
            self._turn("forward", self._open[-1] if self._open else ROOT)
            reached: list[Any] = []  # in backward, one of the outputs: the first counts

            def reach(gradients: Any) -> None:
                if not reached:
                    reached.append(True)
                    self._turn("backward", name)

            for node in {tensor.grad_fn for tensor in _tensors(output)}:
                if node is not None:
                    node.register_prehook(reach)

        return leave

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._own:
            name = self._open[-1] if self._open else ROOT
            if not any(storage.data_ptr() in seen for seen in self._saved.values()):
                self._saved[name][storage.data_ptr()] = storage.nbytes()
        return tensor


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


@contextlib.contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Buffers, gradients and random generators are afterwards what they were."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng():
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient
