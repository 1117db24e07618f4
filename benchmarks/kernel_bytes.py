"""The bytes that kernels load and store in Triton's interpreter, ours and Liger's, over their floors.

Needs TRITON_INTERPRET=1 before Triton is imported. What is done with torch's own operations beside the
kernels (the sums of partial gradients, in ours and in Liger's) is not counted.
"""

import contextlib
import inspect
import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from figure import Figure
from kernel_cases import CASES, Case, Function
from machine import ROOT

PROCESSORS = 132  # an H100's, also for Liger's kernels
TOLERANCE = 1.005  # on "no more than Liger's": what is kept for each row, of rows of few columns
NORMS = ("rms_norm", "rms_norm with residual", "layer_norm")
LOSSES = ("cross_entropy", "cross_entropy_")


def sizes(name: str, quick: bool) -> list[tuple[int, int]]:
    """Rows and columns. Norms deal 4,096 rows to 132 programs; of the others ratios do not depend on rows."""
    if name in NORMS:
        return [(1056, 512)] if quick else [(4096, 1024)]
    if name in LOSSES:
        return [(4, 32_768)] if quick else [(8, 32_768), (8, 128_256)]
    if name == "rope":
        return [(16, 4096)] if quick else [(256, 4096)]  # 32 heads of 128
    return [(64, 1024)] if quick else [(256, 4096)]


def measure(names: list[str], quick: bool) -> list[Figure]:
    """Figures for each kernel and size: forward and backward, or both where they share one floor."""
    figures = (
        [] if find_spec("liger_kernel") else [Figure("liger-kernel: not installed (extra bench)", None, "")]
    )
    cases = [(name, n, d) for name in names for n, d in sizes(name, quick)]
    torch.set_num_threads(1)
    with np.errstate(all="ignore"), gaps_filled():  # forked processes have them, too
        pool = ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("fork"))
        with pool:
            return figures + [figure for found in pool.map(one_case, cases) for figure in found]


def one_case(case: tuple[str, int, int]) -> list[Figure]:
    return case_figures(*case)


def case_figures(name: str, n: int, d: int) -> list[Figure]:
    case = CASES[name](n, d, torch.float16, torch.device("cpu"))
    ours, floors = ratios(case, case.ours)
    limits = {} if name in NORMS and n < 4096 else case.limits  # shares of dW weigh more beside fewer rows
    peer = case.peers.get("liger") if find_spec("liger_kernel") else None
    theirs = {} if peer is None else ratios(case, peer)[0]
    shown = {"both": name} if case.once else {part: f"{name} {part}" for part in ("forward", "backward")}
    return [
        Figure(
            f"{title} {n:,} x {d:,}, floor {floors[part] / 2**20:,.1f} MiB",
            ours[part],
            "x floor",
            better="lower",
            peer="liger" if theirs else None,
            peer_value=theirs.get(part),
            limit=limits.get(part),
            ratio_limit=TOLERANCE if theirs else None,
        )
        for part, title in shown.items()
    ]


def ratios(case: Case, function: Function) -> tuple[dict[str, float], dict[str, int]]:
    """Bytes over floor of each part, and the floors in bytes."""
    ledger = of_tests("kernels.ledger").ledger
    for x in case.leaves():
        x.grad = None
    with ledger() as forward:
        out = function(*case.inputs)
    outputs: list[Tensor] = [o for o in (out if isinstance(out, tuple) else (out,)) if o.requires_grad]
    with ledger() as backward:
        torch.autograd.backward(outputs, [torch.ones_like(o) for o in outputs])
    floors = case.floors(outputs)
    moved = {"forward": forward.total, "backward": backward.total, "both": forward.total + backward.total}
    return {part: moved[part] / floor for part, floor in floors.items()}, floors


def of_tests(name: str) -> Any:
    """A module that the tests have."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    return import_module(f"tests.{name}")


def on_a_gpus_processors(module: Any, name: str) -> None:
    """Liger's norms deal rows to one program on a CPU: let them deal to as many as ours, for good."""
    source = inspect.getsource(getattr(module, name))
    assert source.count("sm_count = 1\n") == 1
    exec(source.replace("sm_count = 1\n", f"sm_count = {PROCESSORS}\n"), vars(module))


@contextlib.contextmanager
def gaps_filled() -> Iterator[None]:
    """What the interpreter lacks for Liger's kernels, and in Triton 3.6 for ours; a GPU's processors."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert, properties = interpreter._implicit_cvt, torch.cuda.get_device_properties

    def with_floats(value: Any) -> Any:
        if isinstance(value, float):
            handle = interpreter.TensorHandle(np.array([value], np.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return convert(value)

    def tanh(x: Any) -> Any:
        return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))

    def rsqrt(x: Any) -> Any:
        return tl.rsqrt(x)  # as the interpreter has it while a kernel runs

    stand_ins = {"tanh": tanh, "rsqrt": rsqrt}
    changed = []
    if find_spec("liger_kernel"):
        for module in map(
            import_module, (f"liger_kernel.ops.{m}" for m in ("rms_norm", "geglu", "layer_norm"))
        ):
            changed += [(module, k, getattr(module, k)) for k in stand_ins if hasattr(module, k)]
        fused = import_module("liger_kernel.ops.fused_add_rms_norm")
        changed.append((fused, "rsqrt", fused.rsqrt))
        for name in ("rms_norm", "layer_norm", "fused_add_rms_norm"):
            on_a_gpus_processors(import_module(f"liger_kernel.ops.{name}"), f"{name}_backward")
    patch = interpreter._patch_lang_tensor
    interpreter._patch_lang_tensor = of_tests("interpreter")._indexing(patch)
    interpreter._implicit_cvt = with_floats
    torch.cuda.get_device_properties = lambda *device: SimpleNamespace(multi_processor_count=PROCESSORS)
    for module, key, _ in changed:
        setattr(module, key, stand_ins[key])
    try:
        yield
    finally:
        interpreter._implicit_cvt, torch.cuda.get_device_properties = convert, properties
        interpreter._patch_lang_tensor = patch
        for module, key, value in changed:
            setattr(module, key, value)
