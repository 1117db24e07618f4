"""How rows lie on a mesh, for DTensors whose rows are whole, and the way to local tensors and back."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


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
        self._rows: Mapping[str, int | None] = {}
        self._parameters: Sequence[str] = ()
        self._broadcast: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        named: Mapping[str, Any],
        rows: Mapping[str, int | None],
        parameters: Sequence[str] = (),
        broadcast: Sequence[str] = (),
    ) -> "Shards | None":
        """Read them off the arguments that hold rows; None where no argument is a DTensor.

        Raises:
            ValueError: An argument is placed as no kernel can take it.
            TypeError: A tensor beside DTensors is none.
        """
        from torch.distributed.tensor import DTensor

        if not any(isinstance(named.get(name), DTensor) for name in (*rows, *parameters, *broadcast)):
            return None
        given = [name for name in rows if isinstance(named.get(name), Tensor)]
        if not given:
            return None  # the function's own checks say what is wrong
        for name in given:
            check_rows(name, named[name], _whole_dim(named[name], rows[name]))
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
        shards._rows, shards._parameters, shards._broadcast = rows, parameters, broadcast
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
        shape = list(self.sizes)
        shape.insert(self.whole, -1)
        for name in self._broadcast:
            if isinstance(value := named.get(name), Tensor):
                dims = range(len(shape) - value.dim(), len(shape))
                local[name] = part(value, dims, self.mesh, self._placements(self.whole), shape)
        return local

    def wrap(self, out: Any) -> Any:
        """The DTensor of a result that has this rank's rows, with its whole dimension or without."""
        if isinstance(out, tuple):
            return tuple(self.wrap(one) for one in out)
        whole = self.whole if out.dim() > len(self.sizes) else None
        shape = list(self.sizes)
        if whole is not None:
            shape.insert(whole, out.shape[whole])
        return from_local(out, self.mesh, self._placements(whole), torch.Size(shape))

    def partial(self, out: Tensor) -> "DTensor":
        """The DTensor of this rank's share of a sum over all rows."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(out, self.mesh, self._summed(), run_check=False)

    def total(self, share: Tensor) -> Tensor:
        """The sum of all ranks' shares, on every rank."""
        from torch.distributed.tensor import Replicate

        whole = self.partial(share).redistribute(self.mesh, [Replicate()] * self.mesh.ndim)
        return whole.to_local()

    def seed(self, seed: Any) -> Any:
        """A seed that only the ranks with the same rows have; what is no seed stays as it is."""
        at = 0
        for dim, p in enumerate(self.placements):
            if not p.is_replicate():
                at = at * self.mesh.size(dim) + self.mesh.get_local_rank(dim)
        if at == 0 or isinstance(seed, bool) or not isinstance(seed, int | Tensor):
            return seed
        step = at * 0x5851F42D4C957F2D  # far from the seeds that a user counts up
        return seed + _wrapped(step) if isinstance(seed, Tensor) else _wrapped(seed + step)

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


def from_local(
    out: Tensor, mesh: "DeviceMesh", placements: "Sequence[Placement]", shape: torch.Size
) -> "DTensor":
    """The DTensor of a result's local part, which may be smaller than that of another rank."""
    from torch.distributed.tensor import DTensor

    stride = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        stride[dim] = stride[dim + 1] * max(shape[dim + 1], 1)
    return DTensor.from_local(
        out.contiguous(), mesh, placements, run_check=False, shape=shape, stride=tuple(stride)
    )


def part(
    x: Tensor,
    dims: Sequence[int | None],
    mesh: "DeviceMesh",
    placements: "Sequence[Placement]",
    shape: Sequence[int],
) -> Tensor:
    """What of x goes with this rank's part of a DTensor of these placements and this shape.

    Args:
        x: A tensor that is the same on all ranks, or a DTensor.
        dims: Which dimensions of the DTensor the first ones of x are; those of another size are spread.
        mesh: The DTensor's mesh.
        placements: Its placements.
        shape: Its shape.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
    wanted: list[Placement] = []
    grads: list[Placement] = []
    for p in placements:
        sharded = getattr(p, "dim", None)
        at = [i for i, dim in enumerate(dims) if dim is not None and dim == sharded]
        if at and x.shape[at[0]] == shape[dims[at[0]]]:  # type: ignore[index]
            wanted.append(moved_to(p, at[0]))
            grads.append(wanted[-1])
        else:
            wanted.append(Replicate())
            grads.append(Replicate() if sharded is None else Partial())
    if tuple(x.placements) != tuple(wanted):
        x = x.redistribute(mesh, wanted)
    return x.to_local(grad_placements=grads)


def _wrapped(number: int) -> int:
    """An integer as int64 has it."""
    return (number + 2**63) % 2**64 - 2**63


def _n_sharded(x: "DTensor") -> int:
    return sum(not p.is_replicate() for p in x.placements)


def _whole_dim(x: Tensor, dim: int | None) -> int | None:
    if dim is None:
        return None
    return x.dim() + dim if dim < 0 else min(dim, x.dim() - 1)


def check_rows(name: str, x: Tensor, whole: int | None) -> None:
    """Refuse what is no DTensor, and one of whose rows a rank has only parts, or summands."""
    from torch.distributed.tensor import DTensor

    if not isinstance(x, DTensor):
        raise TypeError(
            f"{name} is a plain tensor beside DTensors: make it one, e.g. distribute_tensor({name}, mesh, "
            f"placements) or DTensor.from_local({name}, mesh, placements)"
        )
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
    return moved_to(p, dim)


def moved_to(p: "Placement", dim: int) -> "Placement":
    """The placement that shards another dimension in the same way."""
    if dim == p.dim:  # type: ignore[attr-defined]
        return p
    from torch.distributed.tensor import Shard

    return Shard(dim) if isinstance(p, Shard) else type(p)(dim, split_factor=p.split_factor)  # type: ignore
