"""AdamW on the CPU for what torch's own kernels do not have: 16- and 8-bit forms around its fused one.

Chunk by chunk, weights and moments become fp32, torch's fused kernel updates them, and they are rounded
again: the same arithmetic as for fp32 parameters, and little memory.
"""

from typing import Any

import torch
from torch import Tensor

from overlapkit.optim import rounding
from overlapkit.optim.columns import BF16, INT8, KAHAN, LANES, MASTER, ROUNDED
from overlapkit.optim.place import Place, place_of
from overlapkit.optim.state import at_random, local, parts, row_of
from overlapkit.optim.table import Entry

CHUNK = 2**15
"""Elements at a time: what is computed in between stays in a core's cache."""


def update(entry: Entry, grad: Tensor, group: dict[str, Any], factor: Tensor | None) -> None:
    """One AdamW step of one parameter, in place.

    Args:
        entry: The parameter and its state, whose step has been counted up.
        grad: Its gradient on this rank, in the parameter's layout, any floating dtype.
        group: Its group.
        factor: What the gradient is multiplied with, fp32 (), or None.
    """
    param, state, row = local(entry.param), entry.state, row_of(entry.param)
    int8 = entry.form.moments == INT8
    place = place_of(entry.param) if at_random(entry.form) else None
    key = rounding.step_key(rounding.mix(entry.number), int(state["step"]))
    kept = {part.name: local(state[part.name]) for part in parts(entry.param, entry.form)}
    flat = {name: _flat(t) for name, t in kept.items() if "scale" not in name}
    flat_param, flat_grad = _flat(param), _flat(grad)
    size = max(1, CHUNK // row) * row if int8 else CHUNK
    for at in range(0, param.numel(), size):
        part = {name: t[at : at + size] for name, t in flat.items()}
        if int8:
            rows = slice(at // row, (at + size) // row)
            part |= {name: t[rows] for name, t in kept.items() if "scale" in name}
        g = flat_grad[at : at + size].to(torch.float32)
        bits = None if place is None else _bits(key, place, at, len(g))
        _chunk(entry, flat_param[at : at + size], g if factor is None else g * factor, part, group, bits)


def _flat(tensor: Tensor) -> Tensor:
    """Dense memory as a vector, in the order in which it lies there."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _chunk(
    entry: Entry,
    param: Tensor,
    g: Tensor,
    part: dict[str, Tensor],
    group: dict[str, Any],
    bits: Tensor | None,
) -> None:
    """Update a chunk of a parameter; `part` is that of its state, `bits` are random, 32 for each element."""
    form = entry.form
    if form.mode == MASTER:
        w = rounding.join(param, part["remainder"])
    else:
        w = param.to(torch.float32)
        if form.mode == KAHAN:
            w = w + part["compensation"].to(torch.float32)
    m, v = _moments(entry, part)
    largest = [part["max_exp_avg_sq"].to(torch.float32)] if form.amsgrad else []
    beta1, beta2 = (float(beta) for beta in group["betas"])
    torch._fused_adamw_(
        [w],
        [g],
        [m],
        [v],
        largest,
        [entry.state["step"]],
        lr=float(group["lr"]),
        beta1=beta1,
        beta2=beta2,
        weight_decay=float(group["weight_decay"]),
        eps=float(group["eps"]),
        amsgrad=form.amsgrad,
        maximize=group["maximize"],
    )
    if form.mode == ROUNDED:
        assert bits is not None
        param.copy_(rounding.stochastic(w, rounding.low_half(bits)))
    elif form.mode == MASTER:
        high, low = rounding.split(w)
        param.copy_(high)
        part["remainder"].copy_(low)
    elif w is not param:
        param.copy_(w)
        if form.mode == KAHAN:
            part["compensation"].copy_(w - param.to(torch.float32))
    _keep(entry, part, m, v, largest, bits)


def _moments(entry: Entry, part: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    if entry.form.moments != INT8:
        return part["exp_avg"].to(torch.float32), part["exp_avg_sq"].to(torch.float32)
    n = row_of(entry.param)
    m = rounding.signed_value(in_blocks(part["exp_avg"], n), part["exp_avg_scale"].unsqueeze(-1))
    v = rounding.unsigned_value(in_blocks(part["exp_avg_sq"], n), part["exp_avg_sq_scale"].unsqueeze(-1))
    return out_of_blocks(m, n), out_of_blocks(v, n)


def _keep(
    entry: Entry, part: dict[str, Tensor], m: Tensor, v: Tensor, largest: list[Tensor], bits: Tensor | None
) -> None:
    if entry.form.moments == INT8:
        assert bits is not None
        encode(part, m, v, row_of(entry.param), bits)
    elif entry.form.moments == BF16:
        assert bits is not None
        other = rounding.other_bits(bits)
        part["exp_avg"].copy_(rounding.stochastic(m, rounding.high_half(bits)))
        part["exp_avg_sq"].copy_(rounding.stochastic(v, rounding.high_half(other)))
        if entry.form.amsgrad:
            part["max_exp_avg_sq"].copy_(rounding.stochastic(largest[0], rounding.low_half(other)))


def encode(part: dict[str, Tensor], m: Tensor, v: Tensor, n_cols: int, bits: Tensor | None) -> None:
    """Store fp32 moments, flat whole rows, as int8: at random given random bits, else to the nearest."""
    wide_m, wide_v = in_blocks(m, n_cols), in_blocks(v, n_cols)
    scale, scale_sq = rounding.scale_of(wide_m), rounding.scale_of(wide_v)
    random = random_sq = None
    if bits is not None:
        random = in_blocks(rounding.high_half(bits), n_cols)
        random_sq = in_blocks(rounding.high_half(rounding.other_bits(bits)), n_cols)
    part["exp_avg"].copy_(out_of_blocks(rounding.signed_code(wide_m, scale, random), n_cols))
    part["exp_avg_sq"].copy_(out_of_blocks(rounding.unsigned_code(wide_v, scale_sq, random_sq), n_cols))
    part["exp_avg_scale"].copy_(scale.squeeze(-1))
    part["exp_avg_sq_scale"].copy_(scale_sq.squeeze(-1))


def in_blocks(flat: Tensor, n_cols: int) -> Tensor:
    """Whole rows as (rows, blocks, LANES), the last block of each filled up with zeros."""
    rows = flat.view(-1, n_cols)
    rest = -n_cols % LANES
    if rest:
        rows = torch.cat([rows, rows.new_zeros(rows.shape[0], rest)], dim=1)
    return rows.view(rows.shape[0], -1, LANES)


def out_of_blocks(blocks: Tensor, n_cols: int) -> Tensor:
    """What `in_blocks` made, flat again."""
    return blocks.flatten(1)[:, :n_cols].reshape(-1)


def _bits(key: int, place: Place, at: int, size: int) -> Tensor:
    """Random bits for local elements `at` and on."""
    start = place.base + at
    if place.inner == place.outer and start >> 32 == start + size - 1 >> 32:
        return rounding.random_bits_from(key, start, size)
    index = torch.arange(at, at + size, device="cpu")
    if place.inner != place.outer:
        index = index // place.inner * place.outer + index % place.inner
    return rounding.random_bits(key, index.add_(place.base))
