"""Every configuration that launch code can choose, asked of that code: launchers are called, nothing runs.

A configuration is what a kernel is compiled for: dtypes, constants (flags and blocks), warps and registers.
Two sets of calls make them: every block (all widths and few rows, by rule and with each of autotune's
choices) with all options off and all on; and every combination of options, by rule. What launch code chooses
newly, a block or a candidate, is among them by itself; a kernel or a flag's value that is not fails a test.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor

from overlapkit import launch
from overlapkit.kernels.autotune import _CANDIDATES as CHOICES
from overlapkit.kernels.cross_entropy_options import Options
from overlapkit.kernels.gated import _PLAIN as ACTIVATIONS
from overlapkit.kernels.raw import (
    cross_entropy,
    cross_entropy_inplace,
    dropout_add,
    gated,
    norm_backward,
    norm_forward,
    rope,
    softmax,
)
from overlapkit.launch import BY_RULE, Choice
from tests.kernels.ahead import Launch, recorded

N = 4096
ROWS = [N, 8, 4, 2, 1]
"""A block has at most 16 rows: more of them change nothing."""


def powers(most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length())]


@dataclass(frozen=True)
class Case:
    """One launcher.

    Attributes:
        call: Takes rows, columns, a dtype and the options, and calls it.
        widths: From the narrowest row to the widest that the launcher tells apart, or that users have.
        users: What users run: each of these chooses another block.
        options: What it can be called with; the first of each is its plainest, the last its fullest.
    """

    call: Callable[..., None]
    widths: list[int]
    users: list[int]
    options: dict[str, list[Any]] = field(default_factory=dict)

    def ends(self) -> list[dict[str, Any]]:
        """All options off, and all on."""
        return [{name: values[end] for name, values in self.options.items()} for end in (0, -1)]

    def blocks(self) -> Iterator[tuple[int, int, dict[str, Any], Choice]]:
        for choice, n_cols, n_rows, options in product(CHOICES, self.widths, ROWS, self.ends()):
            yield n_rows, n_cols, options, choice

    def combinations(self) -> Iterator[tuple[int, int, dict[str, Any], Choice]]:
        for values in product(*self.options.values()):
            for n_cols in {min(N, self.widths[-1]), self.widths[-1]}:
                yield N, n_cols, dict(zip(self.options, values, strict=True)), BY_RULE


def meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def wide(on: Any, dtype: torch.dtype) -> torch.dtype:
    """The dtype of what is beside x: "float32", or as x."""
    return torch.float32 if on == "float32" else dtype


def norm(
    n: int, d: int, dtype: torch.dtype, weight: Any, bias: bool, residual: Any, result: Any, centred: bool
) -> None:
    if bias and not centred:
        return
    x, w = meta(n, d, dtype=dtype), meta(d, dtype=wide(weight, dtype)) if weight else None
    other = meta(n, d, dtype=wide(residual, dtype)) if residual else None
    b = w if bias else None
    norm_forward.forward(x, w, b, other, 1e-5, 0.0, wide(result, dtype), centred=centred)


def norm_gradient(
    n: int, d: int, dtype: torch.dtype, weight: Any, dsum: bool, dweight: bool, dbias: bool, centred: bool
) -> None:
    if dbias and not centred or dweight and not weight:
        return
    x, rows = meta(n, d, dtype=dtype), meta(n, dtype=torch.float32)
    w = meta(d, dtype=wide(weight, dtype)) if weight else None
    mean = rows if centred else None
    norm_backward.backward(x, x if dsum else None, x, w, mean, rows, 0.0, dweight, dbias)


def gates(n: int, d: int, dtype: torch.dtype, activation: str) -> None:
    x = meta(n, d, dtype=dtype)
    gated.forward(x, x, activation)


def gates_gradient(n: int, d: int, dtype: torch.dtype, activation: str, dgate: bool, dup: bool) -> None:
    if dgate or dup:
        x = meta(n, d, dtype=dtype)
        gated.backward(x, x, x, activation, dgate, dup)


def softmaxes(n: int, d: int, dtype: torch.dtype, mask: torch.dtype | None, result: Any) -> None:
    x = meta(n, d, dtype=dtype)
    softmax.forward(x, None if mask is None else meta(n, d, dtype=mask), 0.5, wide(result, dtype))


def softmax_gradient(n: int, d: int, dtype: torch.dtype, result: Any) -> None:
    x, y = meta(n, d, dtype=wide(result, dtype)), meta(n, d, dtype=wide(result, dtype))
    softmax.backward(x, y, 0.5, dtype)


def dropouts(n: int, d: int, dtype: torch.dtype, residual: Any) -> None:
    x, seed = meta(n, d, dtype=dtype), meta(1, dtype=torch.int64)
    other = meta(n, d, dtype=wide(residual, dtype)) if residual else None
    dropout_add.dropout(x, other, seed, 2**30, 2.0, wide(residual, dtype))


def rotations(
    n: int,
    d: int,
    dtype: torch.dtype,
    heads: tuple[int, int],
    turning: float,
    positions: bool,
    interleaved: bool,
    inverse: bool,
    angles: Any,
) -> None:
    if d < 4:
        return
    q, k = (meta(1, n, h, d, dtype=dtype) for h in heads)
    cos = meta(1, n, int(d * turning) // 2, dtype=wide(angles, dtype))
    at = meta(1, n, dtype=torch.int64) if positions else None
    rope.rotate(q, k, cos, cos, at, interleaved, inverse)


def losses(
    n: int, v: int, dtype: torch.dtype, weight: Any, smoothing: float, softcap: float, part: str
) -> None:
    """`part`: of all classes, of a shard's, the gradient, and that with one of the lse."""
    x, target, rows = meta(n, v, dtype=dtype), meta(n, dtype=torch.int64), meta(n, dtype=torch.float32)
    w = meta(8 * v, dtype=wide(weight, dtype)) if weight else None
    options = Options(label_smoothing=smoothing, z_loss=1e-4, softcap=softcap)
    if part == "whole":
        cross_entropy.forward(x, target, w if w is None else w[:v], options)
    elif part == "shard":
        cross_entropy.statistics(x, target, w, options, (v, 8 * v))
    else:
        dlse = rows if part == "gradient, lse's too" else None
        cross_entropy.backward(rows, dlse, x, target, w, rows, rows, options, (v, 8 * v))


def losses_in_place(
    n: int, v: int, dtype: torch.dtype, weight: Any, smoothing: float, softcap: float, scale: bool
) -> None:
    x, target, rows = meta(n, v, dtype=dtype), meta(n, dtype=torch.int64), meta(n, dtype=torch.float32)
    w = meta(v, dtype=wide(weight, dtype)) if weight else None
    options = Options(label_smoothing=smoothing, z_loss=1e-4, softcap=softcap)
    cross_entropy_inplace.forward_and_gradient_(x, target, w, rows[0] if scale else None, options)


def scaling(n: int, v: int, dtype: torch.dtype) -> None:
    cross_entropy_inplace.scale_(meta(n, v, dtype=dtype), meta(n, dtype=torch.float32))


BESIDE = [None, "float32", "as x"]
CLASSES = {"weight": BESIDE, "smoothing": [0.0, 0.1], "softcap": [0.0, 30.0]}
CASES = [
    Case(
        norm,
        powers(16_384),
        [1024, 4096, 8192, 16_384],
        {"weight": BESIDE, "bias": [False, True], "residual": BESIDE}
        | {"result": ["float32", "as x"], "centred": [False, True]},
    ),
    Case(
        norm_gradient,
        powers(16_384),
        [1024, 4096, 8192, 16_384],
        {"weight": BESIDE} | {name: [False, True] for name in ("dsum", "dweight", "dbias", "centred")},
    ),
    Case(gates, powers(4096), [14_336], {"activation": [*ACTIVATIONS]}),
    Case(
        gates_gradient,
        powers(4096),
        [14_336],
        {"activation": [*ACTIVATIONS], "dgate": [False, True], "dup": [True, False, True]},
    ),
    Case(
        softmaxes,
        powers(131_072),
        [2048, 16_384, 131_072],
        {"mask": [None, torch.bool, torch.float32, torch.bfloat16], "result": ["float32", "as x"]},
    ),
    Case(softmax_gradient, powers(131_072), [2048, 16_384, 131_072], {"result": ["float32", "as x"]}),
    Case(dropouts, powers(4096), [N], {"residual": BESIDE}),
    Case(
        rotations,
        [64, 80, 96, 128, 192, 256],
        [64, 128],
        {"heads": [(1, 1), (32, 8), (12, 12), (128, 8)], "turning": [1.0, 0.25]}
        | {name: [False, True] for name in ("positions", "interleaved", "inverse")}
        | {"angles": ["float32", "as x"]},
    ),
    Case(losses, powers(8192), [128_256], CLASSES | {"part": ["whole"]}),
    Case(losses, powers(8192), [128_256], CLASSES | {"part": ["gradient", "shard", "gradient, lse's too"]}),
    Case(losses_in_place, powers(131_072), [4096, 32_768, 128_256], CLASSES | {"scale": [False, True]}),
    Case(scaling, powers(8192), [128_256]),
]


def configurations(cases: Sequence[Case] = CASES) -> list[Launch]:
    """Each configuration once: by rule where the rule chooses it, with the fewest columns and most rows."""
    found: dict[Any, Launch] = {}
    for case in cases:
        for dtype, call in product(launch.DTYPES, [*case.blocks(), *case.combinations()]):
            n_rows, n_cols, options, choice = call
            with recorded() as launches, launch.choosing(choice):
                case.call(n_rows, n_cols, dtype, **options)
            for one in launches:
                found.setdefault(tuple(one.configuration.items()), one)
    return list(found.values())


def of_users() -> list[Launch]:
    """What users run most: bf16 and fp32, by rule, with no options and with all."""
    found: dict[Any, Launch] = {}
    for case in CASES:
        for dtype, n_cols, options in product((torch.bfloat16, torch.float32), case.users, case.ends()):
            with recorded() as launches:
                case.call(N, n_cols, dtype, **options)
            for one in launches:
                found.setdefault(tuple(one.configuration.items()), one)
    return list(found.values())
