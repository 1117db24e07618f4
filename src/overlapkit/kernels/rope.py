"""Rotary position embedding of queries and keys, both in one launch."""

from typing import Any

import torch
from torch import Tensor

from overlapkit.kernels.arguments import check_floating, check_like, check_no_gradient
from overlapkit.kernels.sharded_tokens import by_tokens
from overlapkit.launch import through_triton


@by_tokens
def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    interleaved: bool = False,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate pairs of columns of each head by the angles of its token's position (Su et al., 2021).

    Heads are the last dimension but one. Tensors of transformers have tokens there: hand them over
    transposed, which copies nothing, `rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)`, and
    transpose the results back.

    Args:
        q: (B, T, H, D) or (T, H, D), floating point, any strides.
        k: (B, T, K, D) or (T, K, D), dtype and device of q. K may differ from H (grouped queries).
        cos: (P, R/2), the cosine of each pair's angle at positions 0 to P - 1; without positions also
            (B, T, R/2) or (1, T, R/2), the angles of each token. Any floating dtype; the arithmetic is
            float32 (float64 for float64). Of (..., R), where every angle stands twice as in transformers,
            the first half is read. It takes no gradient.
        sin: As cos.
        positions: (T,), (1, T) or (B, T) integers, e.g. counted from 0 in each packed document. None:
            token t has row t of cos. Outside of 0 to P - 1 the result is NaN; nothing is looked at
            on the host.
        interleaved: Pairs are neighbours, (0, 1), (2, 3), ... (GPT-J, Meta's Llama, torchtitan). Else
            column i pairs with i + R/2 (GPT-NeoX, transformers).
        rotary_dim: R, the even number of columns that turn; the rest of a head is copied. None for D.

    Returns:
        q and k rotated, with their shapes and dtypes, contiguous.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: Shapes, devices or dtypes do not fit; cos or sin requires a gradient.
    """
    cos, sin, positions = _check(q, k, cos, sin, positions, interleaved, rotary_dim)
    if not through_triton(q):
        angles = _of_tokens(cos, positions, q), _of_tokens(sin, positions, q)
        return _plain(q, *angles, interleaved), _plain(k, *angles, interleaved)
    shapes = q.shape, k.shape
    q, k = (x if x.dim() == 4 else x[None] for x in (q, k))
    if positions is not None:
        positions = positions.expand(q.shape[:2])
    q, k = _rope(q, k, cos, sin, positions, interleaved, False)
    return q.view(shapes[0]), k.view(shapes[1])


def _check(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    interleaved: bool,
    rotary_dim: int | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Refuse what does not fit. Returns cos and sin as (B or 1, P, R/2), and positions."""
    check_floating("q", q)
    if q.dim() not in (3, 4):
        raise ValueError(f"q has shape {tuple(q.shape)}: pass (B, T, H, D) or (T, H, D)")
    if not isinstance(k, Tensor):
        raise TypeError(f"k is a {type(k).__name__}: pass a torch.Tensor")
    heads = k.shape[-2] if k.dim() == q.dim() else 0
    check_like("k", k, (*q.shape[:-2], heads, q.shape[-1]), "q", q)
    if k.dtype != q.dtype:
        raise ValueError(f"k has dtype {k.dtype}, q {q.dtype}: convert one of them with .to(...)")
    width = q.shape[-1] if rotary_dim is None else rotary_dim
    if isinstance(width, bool) or not isinstance(width, int | torch.SymInt):
        raise TypeError(f"rotary_dim={rotary_dim!r} is a {type(rotary_dim).__name__}: pass an int")
    if width % 2 or not 0 < width <= q.shape[-1]:
        raise ValueError(f"rotary_dim={width}: allowed are even numbers from 2 to q's {q.shape[-1]} columns")
    if not isinstance(interleaved, bool):
        raise TypeError(f"interleaved={interleaved!r} is a {type(interleaved).__name__}: pass a bool")
    _check_positions(positions, q)
    return (
        _check_angles("cos", cos, width, positions, interleaved, q),
        _check_angles("sin", sin, width, positions, interleaved, q, cos),
        positions,
    )


def _check_positions(positions: Tensor | None, q: Tensor) -> None:
    if positions is None:
        return
    if not isinstance(positions, Tensor):
        raise TypeError(f"positions is a {type(positions).__name__}: pass a torch.Tensor, or None")
    if positions.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"positions has dtype {positions.dtype}: pass int64 or int32")
    batch, length = q.shape[:-2] if q.dim() == 4 else (1, q.shape[0])
    if not any(positions.shape == shape for shape in ((length,), (1, length), (batch, length))):
        raise ValueError(
            f"positions has shape {tuple(positions.shape)}: q of shape {tuple(q.shape)} needs "
            f"({length},), (1, {length}) or ({batch}, {length})"
        )
    if positions.device != q.device:
        raise ValueError(f"positions is on {positions.device}, q on {q.device}: move positions there")


def _check_angles(
    name: str,
    angles: Tensor,
    width: int,
    positions: Tensor | None,
    interleaved: bool,
    q: Tensor,
    like: Tensor | None = None,
) -> Tensor:
    """Refuse a table that does not fit; return it as (B or 1, P, R/2)."""
    check_floating(name, angles)
    if like is not None:
        check_like(name, angles, like.shape, "cos", like)
    if angles.device != q.device:
        raise ValueError(f"{name} is on {angles.device}, q on {q.device}: move {name} there")
    check_no_gradient(name, angles, "rope")
    batch, length = q.shape[:-2] if q.dim() == 4 else (1, q.shape[0])
    table = angles.dim() == 2 and (positions is not None or angles.shape[0] >= length)
    of_tokens = angles.dim() == 3 and any(angles.shape[:2] == (n, length) for n in (batch, 1))
    of_tokens = of_tokens and positions is None
    if not (table or of_tokens):
        least = "P" if positions is not None else f"{length} or more"
        raise ValueError(
            f"{name} has shape {tuple(angles.shape)}: q of shape {tuple(q.shape)} needs "
            f"({least}, {width // 2})"
            + (f" or ({batch}, {length}, {width // 2})" if positions is None else " beside positions")
        )
    found = angles.shape[-1]
    if found == width and not interleaved:
        angles = angles[..., : width // 2]
    elif found != width // 2:
        raise ValueError(
            f"{name} has {found} columns: {width // 2} are needed, one for each pair"
            + (" (pass one of each pair's two, e.g. cos[..., ::2])" if interleaved else "")
            + (
                f"; to turn {2 * found} of {width} columns pass rotary_dim={2 * found}"
                if found < width
                else ""
            )
        )
    return angles if angles.dim() == 3 else angles[None]


def _of_tokens(angles: Tensor, positions: Tensor | None, q: Tensor) -> Tensor:
    """The angles of each token, to be spread over its heads: (T, 1, R/2) or (B or 1, T, 1, R/2)."""
    if positions is None:
        rows = angles[:, : q.shape[-3]]
    else:
        table = angles[0]
        known = (positions >= 0) & (positions < table.shape[0])
        rows = torch.where(known[..., None], table[torch.where(known, positions, 0)], float("nan"))
    rows = rows[0] if q.dim() == rows.dim() == 3 else rows
    return rows.to(torch.promote_types(q.dtype, torch.float32))[..., None, :]


def _plain(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The same in torch's own operations."""
    turning, rest = x.tensor_split([2 * cos.shape[-1]], dim=-1)
    if interleaved:
        first, second = turning[..., ::2].to(cos.dtype), turning[..., 1::2].to(cos.dtype)
    else:
        first, second = turning.to(cos.dtype).chunk(2, dim=-1)
    pair = first * cos - second * sin, second * cos + first * sin
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((turned.to(x.dtype), rest), -1)


@torch.library.custom_op("overlapkit::rope", mutates_args=())
def _rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    interleaved: bool,
    inverse: bool,
) -> tuple[Tensor, Tensor]:
    from overlapkit.kernels.raw.rope import rotate

    return rotate(q, k, cos, sin, positions, interleaved, inverse)


@_rope.register_fake
def _(q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    contiguous = torch.contiguous_format
    return torch.empty_like(q, memory_format=contiguous), torch.empty_like(k, memory_format=contiguous)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, cos, sin, positions, ctx.interleaved, ctx.inverse = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(cos, sin, positions)


def _differentiate(ctx: Any, dq: Tensor | None, dk: Tensor | None) -> tuple[Tensor | None, ...]:
    """A rotation's gradient is the rotation back; its own gradient is the rotation again."""
    dq = dq if ctx.needs_input_grad[0] else None
    dk = dk if ctx.needs_input_grad[1] else None
    some = dk if dq is None else dq
    if some is None:
        return None, None, None, None, None, None, None
    none = some[:, :, :0]  # no heads, no bytes
    back, back_k = _rope(
        none if dq is None else dq,
        none if dk is None else dk,
        *ctx.saved_tensors,
        ctx.interleaved,
        not ctx.inverse,
    )
    nothing = None, None, None, None, None
    return None if dq is None else back, None if dk is None else back_k, *nothing


_rope.register_autograd(_differentiate, setup_context=_save)
