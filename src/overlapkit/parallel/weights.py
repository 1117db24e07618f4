"""How much each microbatch of a step counts, over all ranks: one small all-reduce, waited for late."""

import functools
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

_WHAT = "the all_reduce of accumulate's token counts"
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
        self._own = _as_tensor([] if isinstance(tokens, Exception) else tokens, parts.device)
        self._scales: Tensor | None = None
        self._total = self._own.sum().view(1)
        said = [_FAILED if isinstance(tokens, Exception) else len(tokens) + _COUNTED]
        self._said: list[int] | Tensor | None = said  # of each rank; a tensor may still be on its way
        self._arrived: torch.cuda.Event | None = None
        if parts.groups:
            ranks: list[int | Tensor] = [0] * dist.get_world_size()
            ranks[dist.get_rank()] = said[0]
            self._total = torch.cat([self._total, _as_tensor(ranks, parts.device)])
            if parts.device.type == "cuda":
                self._reduce_beside()
            else:
                self._begun = self._reduce(0)

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
            if self._arrived is not None:
                self._await(self._arrived)
            said, self._said = self._said, None
            _refuse_uneven(said.tolist() if isinstance(said, Tensor) else said)

    def _reduce(self, place: int) -> Any:
        assert self._roll is not None
        with self._roll.naming(_WHAT):
            return dist.all_reduce(self._total, group=self._parts.groups[place], async_op=True)

    def _reduce_all(self, begun: Any) -> None:
        """Wait for the first all-reduce; then the others, where parts of the job average in two steps."""
        assert self._roll is not None
        for place in range(len(self._parts.groups)):
            work = self._reduce(place) if place else begun
            with self._roll.naming(_WHAT):
                work.wait()

    def _reduce_beside(self) -> None:
        """On CUDA all of it runs on a stream of its own, so that the host can hear of it during forward."""
        beside = _beside(self._parts.device)
        beside.wait_stream(torch.cuda.current_stream(self._parts.device))
        self._total.record_stream(beside)  # a loop that is left early lets go of it early
        with torch.cuda.stream(beside):
            self._reduce_all(self._reduce(0))
            self._said = _host(self._total.shape[0] - 1, self._parts.device)
            self._said.copy_(self._total[1:], non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(beside)

    def _finish(self) -> None:
        if self._arrived is not None:
            torch.cuda.current_stream(self._parts.device).wait_event(self._arrived)
        elif self._parts.groups:
            self._reduce_all(self._begun)
            self._said = self._total[1:]
        total = self._total[0].clamp(min=1).double()  # no token anywhere: every scale is 0
        self._scales = self._own.double() * (self._parts.divisor / total)
        if self._arrived is None:
            self.check()

    def _await(self, arrived: torch.cuda.Event) -> None:
        """Wait for an event, but no longer than the process group waits for a collective."""
        limit = _timeout(self._parts.groups[0], self._parts.device)
        deadline = time.monotonic() + limit
        while not arrived.query():
            if time.monotonic() > deadline:
                assert self._roll is not None
                raise self._roll.failed(_WHAT, TimeoutError(f"not done within {limit:g} s"))
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


def _as_tensor(numbers: Sequence[int | Tensor], device: torch.device) -> Tensor:
    """(n,) int64 on the device. Tensors that are there already are not waited for."""
    there = [number for number in numbers if isinstance(number, Tensor) and number.device.type != "cpu"]
    if there:
        zero = torch.zeros((), dtype=torch.int64, device=there[0].device)
        return torch.stack([zero + number for number in numbers]).to(device)
    here = _host(len(numbers), device)
    for place, number in enumerate(numbers):
        here[place] = int(number)
    return here.to(device, non_blocking=True)


def _host(size: int, device: torch.device) -> Tensor:
    """Host memory that can be copied to and from the device without waiting; its allocator guards reuse."""
    return torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")


@functools.cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


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
