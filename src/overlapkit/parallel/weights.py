"""How much each microbatch of a step counts, over all ranks: one small all-reduce, waited for late."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from overlapkit.parallel.failure import Roll
from overlapkit.parallel.synchronizers import Synchronizers

_FAILED, _COUNTED = 1, 2  # what a rank says of its number of microbatches: it has none; the number plus 2


class Weights:
    """The weights of one rank's microbatches.

    With t tokens here and T over all ranks and microbatches, and a gradient that is the sum over all ranks
    divided by d (their number, as a rule), the mean over a microbatch's tokens counts t d / T: then the
    accumulated gradient is that of the mean over all tokens.

    Args:
        tokens: This rank's tokens per microbatch; or what was raised in counting them.
        parts: Over which ranks gradients are averaged.
        roll: Names the ranks that do not take part; None without ranks.
    """

    def __init__(
        self, tokens: Sequence[int | Tensor] | Exception, parts: Synchronizers, roll: Roll | None
    ) -> None:
        self._parts = parts
        self._roll = roll
        self._count = 0 if isinstance(tokens, Exception) else len(tokens)
        self._own = _as_tensor([] if isinstance(tokens, Exception) else tokens, parts.device)
        self._scales: Tensor | None = None
        self._said: tuple[Tensor, torch.cuda.Event] | None = None
        self._work: Any = None
        self._total = self._own.sum().view(1)
        if parts.groups:
            said = [0] * dist.get_world_size()
            said[dist.get_rank()] = _FAILED if isinstance(tokens, Exception) else self._count + _COUNTED
            self._total = torch.cat([self._total, torch.tensor(said).to(parts.device, non_blocking=True)])
            self._work = self._reduce(parts.groups[0])

    def scale(self, place: int) -> Tensor:
        """What the loss of that microbatch is multiplied by: 0-d, fp64, on the gradients' device.

        Waits for the all-reduce: the host does, or on CUDA the current stream.
        """
        if self._scales is None:
            self._finish()
            assert self._scales is not None
        return self._scales[place]

    def check(self) -> None:
        """Refuse different numbers of microbatches; the host waits to know them.

        Raises:
            ValueError: Ranks have different numbers of them, or all have none.
            RuntimeError: Another rank raised while it counted.
        """
        if self._scales is None:
            self._finish()
        if self._said is not None:
            said, arrived = self._said
            self._said = None
            self._await(arrived)
            _refuse_uneven(said.tolist())

    def _reduce(self, group: dist.ProcessGroup) -> Any:
        assert self._roll is not None
        with self._roll.naming("the all_reduce of accumulate's token counts"):
            return dist.all_reduce(self._total, group=group, async_op=True)

    def _finish(self) -> None:
        for place, group in enumerate(self._parts.groups):
            assert self._roll is not None
            work = self._reduce(group) if place else self._work
            with self._roll.naming("the all_reduce of accumulate's token counts"):
                work.wait()
        self._work = None
        total = self._total[0].clamp(min=1).double()  # no token anywhere: every scale is 0
        self._scales = self._own.double() * (self._parts.divisor / total)
        if self._parts.groups:
            self._hear(self._total[1:])

    def _hear(self, said: Tensor) -> None:
        """Let the others' numbers of microbatches come to the host."""
        if not said.is_cuda:
            _refuse_uneven(said.tolist())
            return
        here = torch.empty(said.shape, dtype=said.dtype, pin_memory=True)
        here.copy_(said, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(said.device))
        self._said = here, arrived

    def _await(self, arrived: torch.cuda.Event) -> None:
        """Wait for an event, but no longer than the process group waits for a collective."""
        limit = _timeout(self._parts.groups[0], self._parts.device)
        deadline = time.monotonic() + limit
        while not arrived.query():
            if time.monotonic() > deadline:
                assert self._roll is not None
                error = TimeoutError(f"not done within {limit:g} s")
                raise self._roll.failed("the all_reduce of accumulate's token counts", error)
            time.sleep(1e-4)


class Scale:
    """What a microbatch's loss is multiplied by: `(loss * scale).backward()`.

    It is known only once every rank has counted its tokens. Nothing waits for that before the first use, in
    any function of torch or by `tensor()` or `float()`: usually the forward lies between.
    """

    def __init__(self, weights: Weights, place: int) -> None:
        self._weights = weights
        self._place = place

    def tensor(self) -> Tensor:
        """The number: 0-d, fp64, on the gradients' device. On CUDA the host does not wait."""
        return self._weights.scale(self._place)

    def __float__(self) -> float:
        return float(self.tensor())

    def __mul__(self, other: Any) -> Any:
        return self.tensor() * other

    def __rmul__(self, other: Any) -> Any:
        return other * self.tensor()

    def __repr__(self) -> str:
        return f"Scale(microbatch {self._place})"  # printing it must not wait

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map(lambda it: it.tensor() if isinstance(it, Scale) else it, (args, kwargs or {}))
        return func(*args, **kwargs)


def count(microbatches: Sequence[Any], tokens: Callable[[Any], Any] | None) -> list[int | Tensor]:
    """The tokens of each microbatch, or 1 each.

    Raises:
        TypeError: `tokens` gives neither an int nor a 0-d integer tensor.
        ValueError: It gives a negative number.
    """
    if tokens is None:
        return [1] * len(microbatches)
    counted = [tokens(microbatch) for microbatch in microbatches]
    for place, number in enumerate(counted):
        whole = isinstance(number, int) and not isinstance(number, bool)
        if isinstance(number, Tensor):
            whole = number.ndim == 0 and not (number.is_floating_point() or number.is_complex())
        if not whole:
            raise TypeError(
                f"tokens gives {number!r} for microbatch {place}: give an int, or a 0-d tensor of integers"
            )
        if isinstance(number, int) and number < 0:
            raise ValueError(f"tokens gives {number} for microbatch {place}: give 0 or more")
    return counted


def _as_tensor(tokens: Sequence[int | Tensor], device: torch.device) -> Tensor:
    """(n,) int64 on the device; tensors that are there already are not waited for."""
    if any(isinstance(number, Tensor) for number in tokens):
        return torch.stack([torch.as_tensor(number, dtype=torch.int64, device=device) for number in tokens])
    return torch.tensor(tokens, dtype=torch.int64).to(device, non_blocking=True)


def _refuse_uneven(said: list[int]) -> None:
    """`said` of each rank of the job: 0 of one outside of the group."""
    failed = [rank for rank, number in enumerate(said) if number == _FAILED]
    if failed:
        raise RuntimeError(
            f"accumulate: counting the microbatches raised on rank(s) {failed}: see the error there"
        )
    numbers = {rank: number - _COUNTED for rank, number in enumerate(said) if number}
    usual, _ = Counter(numbers.values()).most_common(1)[0]
    odd = [f"rank {rank} has {number}" for rank, number in numbers.items() if number != usual]
    if odd:
        more = f", and {len(odd) - 8} more ranks" if len(odd) > 8 else ""
        raise ValueError(
            f"microbatches: {', '.join(odd[:8])}{more}, and the others {usual}: every rank must have as "
            "many, or their collectives would not meet; a rank without data repeats a microbatch for which "
            "tokens= gives 0"
        )
    if usual == 0:
        raise ValueError("microbatches is empty: there is nothing to accumulate")


def _timeout(group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds that a collective of the group may take."""
    options: Any = group._get_backend(device).options
    limit: float = options._timeout.total_seconds()
    return limit
