"""The table that tells the kernel where everything is: in device memory, sent only when it changed."""

import struct
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from overlapkit import launch
from overlapkit.optim import columns as c
from overlapkit.optim.place import place_of, shards_over
from overlapkit.optim.rounding import mix
from overlapkit.optim.state import Form, at_random, local, row_of

_GRADS = {torch.float32: 0, torch.bfloat16: c.GRAD_BF16, torch.float16: c.GRAD_FP16}
_PROGRAMS = 16  # a processor: some waves of them, so that none waits long for the last
_WORDS = {c.EXP_AVG: "exp_avg", c.EXP_AVG_SQ: "exp_avg_sq", c.MAX_SQ: "max_exp_avg_sq", c.STEP: "step"}
_WORDS |= {c.SCALE: "exp_avg_scale", c.SCALE_SQ: "exp_avg_sq_scale"}


class Entry(NamedTuple):
    """One parameter that is to be updated.

    Attributes:
        param: It, a DTensor or plain.
        form: How it and its moments are kept.
        state: Its state.
        group: The index of its group.
        number: Its place among all parameters of the optimizer, the same on all ranks.
    """

    param: Tensor
    form: Form
    state: dict[str, Any]
    group: int
    number: int


class Table:
    """The table of some parameters with gradients, on one device.

    Invariants:
        * What it holds of a tensor is right as long as addresses, dtypes and layouts are those it was made
          with: `fits` says so of gradients, and whoever makes it watches the rest.
        * A table that a CUDA graph has read is never written again.
        * Its memory is not used again before each stream that has stepped with it is done.

    Attributes:
        tensors: All memory that the kernel reaches through it, gradients and hyperparameters included.
        kinds: What the kernel is compiled for.
        meshes: Over what the sums of squares must be added up, one for each row of them.
        programs: The grid.
    """

    def __init__(self, entries: Sequence[Entry], grads: Sequence[Tensor]) -> None:
        self.device = local(entries[0].param).device
        self._entries = entries
        self._dtypes = [grad.dtype for grad in grads]
        self._aligned = [grad.data_ptr() % 16 == 0 for grad in grads]
        kinds = [_kind(entry, grad) for entry, grad in zip(entries, grads, strict=True)]
        self.kinds = tuple(sorted(set(kinds)))
        found = [shards_over(entry.param) for entry in entries]
        self.meshes = list(dict.fromkeys(found))
        blocks = [_blocks(entry) for entry in entries]
        ends = list(accumulate(blocks, initial=0))
        self.n_blocks = ends[-1]
        self.programs = max(1, min(self.n_blocks, _PROGRAMS * launch.processors(self.device)))
        rows = np.zeros((len(entries) + 1, c.ROW), np.int64)
        for i, entry in enumerate(entries):
            rows[i] = _row(entry, self.kinds.index(kinds[i]), ends[i], self.meshes.index(found[i]))
        rows[-1, c.FIRST_BLOCK] = self.n_blocks
        starts = [bisect_right(ends, self.n_blocks * p // self.programs) - 1 for p in range(self.programs)]
        # a graph that captured the copy reads its source at each replay
        self.rows, self._source = _sent(np.concatenate([rows.ravel(), np.array(starts)]), self.device)
        self._fixed = [t for e in entries for t in (local(e.param), *_tensors(e.state).values())]
        self._numbers: tuple[Any, ...] = ()
        self._pointers: list[int] = []
        self._kept: list[Tensor] = []
        self._plain: list[tuple[Any, ...]] | None = None
        self._rows_of_groups: tuple[list[list[int]], list[Tensor]] = ([], [])
        self.tensors: list[Tensor] = []
        self.live: Tensor | None = None
        self._spare: Tensor | None = None
        self._stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    def _of_groups(self, groups: Sequence[dict[str, Any]]) -> tuple[list[list[int]], list[Tensor]]:
        """`_numbers`, kept as long as they are Python's and the same."""
        plain = _plain_numbers(groups)
        if plain is None or plain != self._plain:
            self._rows_of_groups, self._plain = _numbers(groups, self.device), plain
        return self._rows_of_groups

    @property
    def captured(self) -> bool:
        """Whether a CUDA graph reads it: then it must live as long as that."""
        return bool(self._kept)

    @property
    def n_sums(self) -> int:
        """Sums of squares that the update adds up: `summed_over_meshes` leaves one for each mesh."""
        return len(self.meshes) * (self.programs if self.meshes == [None] else 1)

    def fits(self, grads: Sequence[Tensor], pointers: Sequence[int]) -> bool:
        """Whether gradients at other addresses can be put in: they are of the same dtypes and alignment."""
        return [g.dtype for g in grads] == self._dtypes and [p % 16 == 0 for p in pointers] == self._aligned

    def refresh(
        self,
        grads: Sequence[Tensor],
        pointers: list[int],
        groups: Sequence[dict[str, Any]],
        max_norm: float | None,
    ) -> None:
        """Put in the gradients' addresses and the groups' numbers; copies nothing if they are as before."""
        self._also_used_here()
        numbers, on_device = self._of_groups(groups)
        head = (len(grads), self.n_blocks, self.n_sums, max_norm or 0.0)
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        self.tensors = [*self._fixed, *grads, *on_device]
        if (pointers, (head, numbers)) == (self._pointers, self._numbers) and not capturing:
            return
        words = np.empty(c.HEAD + len(pointers) + len(groups) * c.GROUP_ROW, np.int64)
        words[: c.HEAD] = (*head[:3], _bits(head[3]))
        words[c.HEAD : c.HEAD + len(pointers)] = pointers
        words[c.HEAD + len(pointers) :] = [word for group in numbers for word in group]
        self.live, host = _sent(words, self.device, self._spare if capturing else None)
        if capturing:  # a replay copies the same words again: nothing else may come to be there
            self._kept += [self.live, host]
            self._spare, self._pointers = None, []
            return
        self._pointers, self._numbers = pointers, (head, numbers)
        if self._spare is None and self.device.type == "cuda":
            self._spare = _pinned(len(words))  # none can be made while capturing

    def _also_used_here(self) -> None:
        """The loop steps on another stream than before: not only that it was allocated for uses it."""
        if self._stream is not None and (here := torch.cuda.current_stream(self.device)) != self._stream:
            self._stream = here
            for tensor in (self.rows, self.live):
                if tensor is not None:
                    tensor.record_stream(here)


def _plain_numbers(groups: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]] | None:
    """The groups' numbers, or None where one is a tensor, which may have changed without being another."""
    found = [(g["lr"], *g["betas"], g["eps"], g["weight_decay"], g["maximize"]) for g in groups]
    return None if any(isinstance(x, Tensor) for row in found for x in row[:3]) else found


def _tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    """This rank's tensors of a state; a program may keep other things there."""
    return {name: local(x) for name, x in state.items() if isinstance(x, Tensor)}


def _kind(entry: Entry, grad: Tensor) -> int:
    form = entry.form
    kind = form.mode | form.moments | _GRADS[grad.dtype]
    if local(entry.param).dtype == torch.bfloat16:
        kind |= c.HALF_PARAM
    if form.amsgrad:
        kind |= c.AMSGRAD
    if at_random(form):
        place = place_of(entry.param)
        if place.inner != place.outer:
            kind |= c.SPLIT
    whole = row_of(entry.param) % c.LANES == 0
    if form.moments == c.INT8 and whole:
        kind |= c.WHOLE_ROWS
    held = [local(entry.param), grad, *(t for k, t in _tensors(entry.state).items() if k != "step")]
    if all(t.data_ptr() % 16 == 0 for t in held):
        kind |= c.ALIGNED
    return kind


def _blocks(entry: Entry) -> int:
    here = local(entry.param)
    if entry.form.moments == c.INT8:
        return -(-here.shape[0] * -(-row_of(entry.param) // c.LANES) * c.LANES // c.TILE)
    return -(-here.numel() // c.TILE)


def _row(entry: Entry, kind: int, first: int, mesh: int) -> list[int]:
    row, here = [0] * c.ROW, local(entry.param)
    row[c.PARAM] = here.data_ptr()
    for place, name in _WORDS.items():
        if name in entry.state:
            row[place] = local(entry.state[name]).data_ptr()
    low = entry.state.get("remainder", entry.state.get("compensation"))
    row[c.LOW] = 0 if low is None else local(low).data_ptr()
    row[c.NUMEL], row[c.FIRST_BLOCK], row[c.KIND], row[c.GROUP] = here.numel(), first, kind, entry.group
    row[c.MESH], row[c.KEY] = mesh, mix(entry.number)
    if at_random(entry.form):
        row[c.BASE], row[c.INNER], row[c.OUTER] = place_of(entry.param)
    row[c.COLS] = max(1, row_of(entry.param)) if here.dim() else 1
    row[c.BLOCKS_A_ROW] = -(-row[c.COLS] // c.LANES)
    return row


def _numbers(groups: Sequence[dict[str, Any]], device: torch.device) -> tuple[list[list[int]], list[Tensor]]:
    """The groups' rows of the live table, and the tensors that they point to."""
    rows, on_device = [], []
    for group in groups:
        row = [0] * c.GROUP_ROW
        beta1, beta2 = group["betas"]
        for place, pointer, value in (
            (c.LR, c.LR_AT, group["lr"]),
            (c.BETA1, c.BETA1_AT, beta1),
            (c.BETA2, c.BETA2_AT, beta2),
        ):
            if isinstance(value, Tensor) and value.device == device and device.type == "cuda":
                value = value if value.dtype == torch.float32 else value.float()
                row[pointer] = value.data_ptr()
                on_device.append(value)
            else:
                row[place] = _bits(float(value))
        row[c.EPS], row[c.WEIGHT_DECAY] = _bits(float(group["eps"])), _bits(float(group["weight_decay"]))
        row[c.SIGN] = _bits(-1.0 if group["maximize"] else 1.0)
        rows.append(row)
    return rows, on_device


def _bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _sent(words: Any, device: torch.device, host: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Words in device memory, without waiting for the copy, and the host memory that they come from."""
    if device.type != "cuda":
        there = torch.from_numpy(words)
        return there, there
    if host is None:
        host = _pinned(len(words))
    host.numpy()[:] = words
    there = torch.empty(len(words), dtype=torch.int64, device=device)
    there.copy_(host, non_blocking=True)
    return there, host


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=True)
