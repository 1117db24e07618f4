"""Every configuration of the optimizer's kernels, asked of the code that makes their table.

What they are compiled for is the kinds of the tensors in a table, each a set of bits. Here each kind is in a
table alone, and some are together.
"""

import contextlib
from collections.abc import Iterator
from itertools import product
from unittest import mock

import torch
from torch import Tensor, nn

from overlapkit.optim import table as tables
from overlapkit.optim.arguments import check_form, check_precision
from overlapkit.optim.columns import AMSGRAD, FP32, PLAIN, SPLIT
from overlapkit.optim.place import Place
from overlapkit.optim.raw import launcher
from overlapkit.optim.raw.adamw import update
from overlapkit.optim.state import MODES, MOMENTS, Form, at_random, form_of, make
from overlapkit.optim.table import Entry, Table
from tests.kernels.ahead import Launch, recorded

GROUP = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "maximize": False}
SHAPES = [(64, 256), (64, 100)]
"""Rows of whole blocks of int8 moments, and others."""


def entries() -> Iterator[tuple[Entry, Tensor]]:
    """One parameter of each kind and its gradient."""
    for dtype, grads, amsgrad, moments, offset, shape in product(
        (torch.float32, torch.bfloat16), tables._GRADS, (False, True), MOMENTS, (0, 1), SHAPES
    ):
        memory = torch.zeros(64 * 256 + 8, dtype=dtype)
        param = nn.Parameter(memory[offset:][: shape[0] * shape[1]].view(shape))
        grad = torch.zeros(shape, dtype=grads)
        for mode in MODES if dtype == torch.bfloat16 else ("fp32",):
            form = form_of(param, mode, moments, amsgrad)
            with contextlib.suppress(ValueError):  # what AdamW refuses
                check_precision([param], mode)
                check_form(param, form, None, None)
                yield Entry(param, form, make([param], [form], None)[0], 0, 0), grad


def all_tables() -> Iterator[Table]:
    """One for each kind, whole and cut by ranks, and one that has some together."""
    found: dict[int, tuple[Entry, Tensor]] = {}
    for entry, grad in entries():
        for place in (Place(0, 256, 256), Place(0, 128, 256)):
            if place.inner != place.outer and not at_random(entry.form):
                continue
            with mock.patch.object(tables, "place_of", return_value=place):
                kind = tables._kind(entry, grad)
                if kind not in found:
                    found[kind] = entry, grad
                    yield refreshed(Table([entry], [grad]), [grad])
    some = [found[kind] for kind in sorted(found) if not kind & (AMSGRAD | SPLIT)][:6]
    grads = [grad for _, grad in some]
    yield refreshed(Table([entry for entry, _ in some], grads), grads)


def refreshed(table: Table, grads: list[Tensor]) -> Table:
    table.refresh(grads, [g.data_ptr() for g in grads], [GROUP], 1.0)
    return table


def step(table: Table, scale: bool, found_inf: bool, clip: bool) -> None:
    """AdamW.step."""
    one = torch.ones(1)
    sums = launcher.squares(table) if clip else None
    done = torch.zeros(1, dtype=torch.int32)
    norm = torch.ones(()) if clip else None
    launcher.update(table, done, one if scale else None, one if found_inf else None, sums, norm)


def clip_alone(grad: Tensor) -> None:
    """clip_grad_norm_, by both of its norms."""
    table = refreshed(Table([Entry(grad, Form(PLAIN, FP32, False), {}, 0, 0)], [grad]), [grad])
    for largest in (False, True):
        launcher.multiply(table, launcher.squares(table, largest=largest), largest=largest)


def configurations() -> list[Launch]:
    """Each kind with all flags and with none, the first with all combinations; and clipping alone."""
    with recorded() as made:
        for number, table in enumerate(all_tables()):
            for flags in product((True, False), repeat=3):
                if number == 0 or len(set(flags)) == 1:
                    step(table, *flags)
        for dtype, offset in product(tables._GRADS, (0, 1)):
            clip_alone(torch.zeros(1024 + 8, dtype=dtype)[offset:][:1024])
    return list({tuple(one.configuration.items()): one for one in made}.values())


def of_users() -> list[Launch]:
    """The step with clipping, of an aligned parameter of each precision and moments; and clipping alone."""
    with recorded() as made:
        for entry, grad in entries():
            param, form = entry.param, entry.form
            usual = grad.dtype == param.dtype and not form.amsgrad and param.shape == SHAPES[0]
            if usual and param.data_ptr() % 16 == 0:
                step(refreshed(Table([entry], [grad]), [grad]), False, False, True)
        made[:] = [
            one for one in made if one.kernel is update
        ]  # sums of squares are those of gradients alone
        clip_alone(torch.zeros(1024, dtype=torch.bfloat16))
    return list({tuple(one.configuration.items()): one for one in made}.values())
