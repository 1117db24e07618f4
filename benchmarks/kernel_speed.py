"""The time of kernels on a GPU beside their peers, and the share of the memory's speed that they reach.

Forward, and forward with backward, each captured in a CUDA graph, so that no launch from Python counts. The
variants are replayed in turns, the L2 cache flushed before each replay. Every kernel is measured at its first
width, then a language model's head, then each kernel beside torch.compile, which takes seconds for it, and
only then at its other widths: a budget that ends leaves out those, not kernels.
"""

import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

import ceilings
from budget import Budget
from figure import Figure
from harness import Measurement, alternate, time_figure, timer_for
from kernel_cases import CASES, Case, Function
from kernel_memory import HEAD, head_figures

WIDTHS = (4096, 8192, 16_384)
CLASSES = (32_768, 128_256)
ELEMENTS = 2**27  # of each tensor: 256 MiB in bf16, beyond any cache
SHARE = 90.0  # % of the copy bandwidth
AHEAD = 1.0
PEERS = {"liger": "liger_kernel", "quack": "quack"}
COMPILED = 1  # the turn in which torch.compile is the peer
LOSSES = ("cross_entropy", "cross_entropy_")
HEAD_S = 20.0
"""What the head of a language model takes, the compilation of its peer included."""


def measure(names: list[str], quick: bool, device: torch.device, budget: Budget) -> list[Figure]:
    """Figures of each kernel at each width: share of copy bandwidth, time against each peer, peak memory."""
    rounds = 5 if quick else 20
    copy = copy_bandwidth(device, rounds)
    figures = [Figure("copy bandwidth", copy / 1e9, "GB/s")]
    figures += [
        Figure(f"{peer}: not installed", None, "ms")
        for peer, package in PEERS.items()
        if find_spec(package) is None
    ]
    before = 0.0  # seconds of the one before
    for turn, name, d in sizes(names, quick):
        if name == HEAD:
            figures += budget.attempt(HEAD_S, HEAD, partial(head_figures, quick, device))
            continue
        title, began = f"{name} {ELEMENTS // d:,} x {d:,}", time.monotonic()
        one = partial(size_figures, title, name, d, turn == COMPILED, device, rounds, copy)
        figures += budget.attempt(
            before, f"{title} against torch.compile" if turn == COMPILED else title, one
        )
        before = time.monotonic() - began
    return figures


def size_figures(
    title: str, name: str, d: int, compiled: bool, device: torch.device, rounds: int, copy: float
) -> list[Figure]:
    """One kernel at one width, or what it is there beside torch.compile."""
    case = CASES[name](ELEMENTS // d, d, torch.bfloat16, device)
    if not compiled:
        return case_figures(title, case, device, rounds, copy)
    case.peers = {"torch.compile": torch.compile(case.peers["torch"], dynamic=False)}
    return [
        figure for figure in case_figures(title, case, device, rounds, copy) if " against " in figure.name
    ]


def sizes(names: list[str], quick: bool) -> list[tuple[int, str, int]]:
    """(turn, kernel, width): at their first width, the head, beside torch.compile, at other widths."""
    found = [(COMPILED, HEAD, 0)] if HEAD in names else []
    for name in names:
        if name == HEAD:
            continue
        first, *others = CLASSES if name in LOSSES else WIDTHS
        found += [(0, name, first), (COMPILED, name, first)]
        if not quick and name != "rope":
            found += [(COMPILED + 1 + turn, name, d) for turn, d in enumerate(others)]
    return sorted(found, key=lambda size: size[0])


def copy_bandwidth(device: torch.device, rounds: int) -> float:
    """Bytes a second, read and written, of a copy of 1 GiB on the device."""
    moves, sizes = ceilings.copies(2**30, device)
    took = alternate({"copy": moves["copy"]}, rounds=rounds, warmup=2, timer=timer_for(device))
    return sizes["copy"] / took["copy"].median


def case_figures(title: str, case: Case, device: torch.device, rounds: int, copy: float) -> list[Figure]:
    functions = {"ours": case.ours, **{p: fn for p, fn in case.peers.items() if usable(p)}}
    floors = case.floors(outputs_of(case.ours(*case.inputs)))
    figures = []
    for peer in list(functions):
        if peer != "ours" and (error := why_not(functions[peer], case)):
            figures.append(Figure(f"{title} against {peer}: {error}", None, "us"))
            del functions[peer]
    for part in ("forward", "both"):
        if part not in floors:
            continue
        took = times(functions, case, part == "both", device, rounds)
        ours = took.pop("ours")
        label = f"{title}, {'forward' if part == 'forward' else 'forward + backward'}"
        share = 100 * floors[part] * case.passes.get(part, 1.0) / ours.median / copy
        figures.append(Figure(f"{label}: of copy bandwidth", share, "%", better="higher", limit=SHARE))
        figures += [
            time_figure(f"{label} against {peer}", ours, other, unit="us", ratio_limit=AHEAD)
            for peer, other in took.items()
        ]
    figures += memory_figures(title, functions, case, device)
    return figures


def usable(peer: str) -> bool:
    return peer not in PEERS or find_spec(PEERS[peer]) is not None


def why_not(function: Function, case: Case) -> str | None:
    """What a peer raises: its versions differ, and one that fails must not cost the others' figures."""
    try:
        step(function, case, gradients_of(function, case))
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:80] if str(error) else ''}"
    return None


def times(
    functions: dict[str, Function], case: Case, backward: bool, device: torch.device, rounds: int
) -> dict[str, Measurement]:
    """Medians by variant."""
    replays: dict[str, Callable[[], object]] = {}
    for name, function in functions.items():
        call = partial(step, function, case, gradients_of(function, case) if backward else None)
        try:
            replays[name] = captured(call, device)
        except RuntimeError:  # a peer that waits for the device cannot be captured
            if name == "ours":
                raise
            replays[f"{name} launched from Python"] = call
    return alternate(replays, rounds=rounds, warmup=2, timer=timer_for(device))


def outputs_of(out: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return [o for o in (out if isinstance(out, tuple) else (out,)) if o.requires_grad]


def gradients_of(function: Function, case: Case) -> list[Tensor]:
    """Random gradients of a function's outputs, made before anything is timed."""
    return [torch.randn_like(o) for o in outputs_of(function(*case.inputs))]


def step(function: Function, case: Case, gradients: list[Tensor] | None) -> object:
    """One pass, with backward where there are gradients; what it returns keeps a graph's results alive."""
    if gradients is None:
        with torch.no_grad():
            return function(*case.inputs)
    return torch.autograd.grad(outputs_of(function(*case.inputs)), case.leaves(), gradients)


def captured(fn: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """A replay of fn; without a GPU fn itself, so that this file can be tried there."""
    if device.type != "cuda":
        return fn
    here = torch.cuda.current_stream(device)
    with torch.cuda.device(device), torch.cuda.stream(here):  # a capture that fails would leave its stream
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                fn()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = fn()

    def replay(kept: object = kept) -> None:
        graph.replay()

    return replay


def memory_figures(
    title: str, functions: dict[str, Function], case: Case, device: torch.device
) -> list[Figure]:
    """The peak of forward and backward beside the inputs."""
    peaks = {
        name: peak_memory(partial(step, fn, case, gradients_of(fn, case)), device)
        for name, fn in functions.items()
    }
    ours = peaks.pop("ours")
    if ours is None or not peaks:
        return []
    best = min(peaks, key=lambda name: peaks[name] or 0)
    return [Figure(f"{title}: peak memory", ours, "MiB", "lower", best, peaks[best])]


def peak_memory(fn: Callable[[], object], device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    fn()
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20
