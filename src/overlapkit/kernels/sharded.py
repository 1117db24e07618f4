"""DTensors whose rows are whole: a kernel runs on the rows that a rank has, and its results are DTensors.

No collectives but one: the mean of a loss is over the targets of all ranks, whose number is one all-reduce.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

Function = TypeVar("Function", bound=Callable[..., Any])
LAST = -1


def by_rows(*rows: str, whole: Sequence[str] = ()) -> Callable[[Function], Function]:
    """Decorate a function of rows, so that it takes DTensors too; plain tensors pass untouched.

    Args:
        rows: Names of the tensors (..., D) whose rows it works on. They may be sharded in every dimension
            but the last; where they are sharded differently, the one with most sharded dimensions leads.
        whole: Names of the parameters, each replicated or a plain tensor, the same on all ranks. The
            gradient of a replicated one is partial over the mesh dimensions that shard rows; that of a
            plain one is summed over them.
    """

    def decorate(fn: Function) -> Function:
        names = list(inspect.signature(fn).parameters)

        @functools.wraps(fn)
        def with_dtensors(*args: Any, **kwargs: Any) -> Any:
            if not _any_subclass(args, kwargs):
                return fn(*args, **kwargs)
            named = dict(zip(names, args, strict=False)) | kwargs
            shards = Shards.of(named, dict.fromkeys(rows, LAST), whole)
            if shards is None:
                return fn(*args, **kwargs)
            return shards.wrap(fn(**shards.local(named)))

        return cast(Function, with_dtensors)

    return decorate


def loss_by_rows(
    logits: str, *, classes: int, whole: Sequence[str], count: Callable[[dict[str, Any]], Tensor]
) -> Callable[[Function], Function]:
    """As `by_rows`, for a loss of `logits` and target with a reduction, and perhaps the rows' lse beside it.

    With "sum" and "mean" the loss is partial over the mesh dimensions that shard rows; its mean is over the
    rows of all ranks.

    Args:
        logits: Name of the tensor that holds rows.
        classes: The dimension of it that must be whole.
        whole: As for `by_rows`.
        count: What the mean of one rank's rows divides by (0 without any), from the arguments by name.
    """

    def decorate(fn: Function) -> Function:
        names = list(inspect.signature(fn).parameters)

        @functools.wraps(fn)
        def with_dtensors(*args: Any, **kwargs: Any) -> Any:
            if not _any_subclass(args, kwargs):
                return fn(*args, **kwargs)
            named = dict(zip(names, args, strict=False)) | kwargs
            target = named.get("target")
            soft = isinstance(target, Tensor) and target.is_floating_point()  # class probabilities
            shards = Shards.of(named, {logits: classes, "target": classes if soft else None}, whole)
            if shards is None:
                return fn(*args, **kwargs)
            reduction, local = named.get("reduction", "mean"), shards.local(named)
            if reduction not in ("mean", "sum"):
                return shards.wrap(fn(**local))
            out = fn(**local | {"reduction": "sum"})
            loss, rest = (out[0], shards.wrap(out[1:])) if isinstance(out, tuple) else (out, ())
            if reduction == "mean":
                total = shards.total(count(local))
                loss = loss / torch.where(total == 0, 1, total)
            loss = shards.partial(loss)
            return (loss, *rest) if rest else loss

        return cast(Function, with_dtensors)

    return decorate


def _any_subclass(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether there is more to look at. All that most calls pay: torch's DTensor is not imported for them."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and type(value) is not Tensor and type(value) is not nn.Parameter:
            return True
    return False


class Shards:
    """How rows lie on a mesh: the sizes of all dimensions but the whole one, and their placements.

    Attributes:
        mesh: The DeviceMesh of all arguments.
        placements: One for each mesh dimension, in terms of `sizes`.
        sizes: The global sizes of the rows' dimensions.
        whole: Where the whole dimension is between them.
    """

    def __init__(
        self, mesh: "DeviceMesh", placements: "list[Placement]", sizes: list[int], whole: int
    ) -> None:
        self.mesh, self.placements, self.sizes, self.whole = mesh, placements, sizes, whole
        self._rows: dict[str, int | None] = {}
        self._parameters: Sequence[str] = ()

    @classmethod
    def of(
        cls, named: dict[str, Any], rows: dict[str, int | None], parameters: Sequence[str]
    ) -> "Shards | None":
        """Read them off the arguments that hold rows; None where no argument is a DTensor.

        Raises:
            ValueError: An argument is placed as no kernel can take it.
            TypeError: A tensor beside DTensors is none.
        """
        from torch.distributed.tensor import DTensor

        if not any(isinstance(named.get(name), DTensor) for name in (*rows, *parameters)):
            return None
        given = [name for name in rows if isinstance(named.get(name), Tensor)]
        if not given:
            return None  # the function's own checks say what is wrong
        for name in given:
            if not isinstance(named[name], DTensor):
                raise TypeError(
                    f"{name} is a plain tensor beside DTensors: make it one, e.g. distribute_tensor({name}, "
                    f"mesh, placements) or DTensor.from_local({name}, mesh, placements)"
                )
            _check_rows(name, named[name], _whole_dim(named[name], rows[name]))
        first = leader = given[0]
        mesh = named[first].device_mesh
        for name in (*given, *parameters):
            if isinstance(named.get(name), DTensor) and named[name].device_mesh != mesh:
                raise ValueError(
                    f"{name} lies on {named[name].device_mesh}, {first} on {mesh}: use one mesh for both"
                )
        for name in given:  # as torch's elementwise operations choose
            if _n_sharded(named[name]) > _n_sharded(named[leader]):
                leader = name
        lead, whole = named[leader], _whole_dim(named[leader], rows[leader])
        placements = [_moved(p, whole, None) for p in lead.placements]
        sizes = [size for dim, size in enumerate(lead.shape) if dim != whole]
        first_whole = _whole_dim(named[first], rows[first])
        assert first_whole is not None
        shards = cls(mesh, placements, sizes, first_whole)
        shards._rows, shards._parameters = rows, parameters
        return shards

    def local(self, named: dict[str, Any]) -> dict[str, Any]:
        """The arguments with this rank's rows, and whole parameters, in place of DTensors."""
        local = dict(named)
        for name, dim in self._rows.items():
            if isinstance(named.get(name), Tensor):
                value, placements = named[name], self._placements(_whole_dim(named[name], dim))
                if tuple(value.placements) != tuple(placements):
                    value = value.redistribute(self.mesh, placements)
                local[name] = value.to_local()
        for name in self._parameters:
            if isinstance(named.get(name), Tensor):
                local[name] = self._parameter(name, named[name])
        return local

    def wrap(self, out: Any) -> Any:
        """The DTensor of a result that has this rank's rows, with its whole dimension or without."""
        from torch.distributed.tensor import DTensor

        if isinstance(out, tuple):
            return tuple(self.wrap(one) for one in out)
        whole = self.whole if out.dim() > len(self.sizes) else None
        shape = list(self.sizes)
        if whole is not None:
            shape.insert(whole, out.shape[whole])
        stride = [1] * len(shape)
        for dim in range(len(shape) - 2, -1, -1):
            stride[dim] = stride[dim + 1] * max(shape[dim + 1], 1)
        return DTensor.from_local(
            out.contiguous(),
            self.mesh,
            self._placements(whole),
            run_check=False,
            shape=torch.Size(shape),
            stride=tuple(stride),
        )

    def partial(self, out: Tensor) -> "DTensor":
        """The DTensor of this rank's share of a sum over all rows."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(out, self.mesh, self._summed(), run_check=False)

    def total(self, share: Tensor) -> Tensor:
        """The sum of all ranks' shares, on every rank."""
        from torch.distributed.tensor import Replicate

        whole = self.partial(share).redistribute(self.mesh, [Replicate()] * self.mesh.ndim)
        return whole.to_local()

    def _placements(self, whole: int | None) -> "list[Placement]":
        return [_moved(p, None, whole) for p in self.placements]

    def _summed(self) -> "list[Placement]":
        from torch.distributed.tensor import Partial, Replicate

        return [Replicate() if p.is_replicate() else Partial() for p in self.placements]

    def _parameter(self, name: str, value: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, Replicate

        replicated = [Replicate()] * self.mesh.ndim
        if not isinstance(value, DTensor):
            if not (value.requires_grad and torch.is_grad_enabled()):
                return value
            value = DTensor.from_local(value, self.mesh, replicated, run_check=False)
        elif not all(p.is_replicate() for p in value.placements):
            raise ValueError(
                f"{name} has placements {tuple(value.placements)}: every rank needs all of it, "
                f"{name}.redistribute(placements={replicated})"
            )
        return value.to_local(grad_placements=self._summed())


def _n_sharded(x: "DTensor") -> int:
    return sum(not p.is_replicate() for p in x.placements)


def _whole_dim(x: Tensor, dim: int | None) -> int | None:
    if dim is None:
        return None
    return x.dim() - 1 if dim == LAST else min(dim, x.dim() - 1)


def _check_rows(name: str, x: "DTensor", whole: int | None) -> None:
    """Refuse a DTensor of whose rows a rank has only parts, or summands."""
    for p in x.placements:
        dim = getattr(p, "dim", None)  # Shard and _StridedShard have one
        if p.is_replicate() or (dim is not None and dim != whole):
            continue
        what = f"is sharded in dimension {dim}, along its rows" if dim is not None else "is a sum to be done"
        raise ValueError(
            f"{name} {what} (placements {tuple(x.placements)}): every rank needs whole rows, "
            f"{name}.redistribute(placements=...) with Replicate() there or Shard() of another dimension"
        )


def _moved(p: "Placement", without: int | None, with_: int | None) -> "Placement":
    """A placement after the whole dimension was taken out of, or put into, a shape."""
    dim = getattr(p, "dim", None)
    if dim is None or (without is None and with_ is None):
        return p
    if without is not None and dim > without:
        dim -= 1
    if with_ is not None and dim >= with_:
        dim += 1
    if dim == p.dim:  # type: ignore[attr-defined]
        return p
    from torch.distributed.tensor import Shard

    return Shard(dim) if isinstance(p, Shard) else type(p)(dim, split_factor=p.split_factor)  # type: ignore
