"""A trace of any size in Kineto's layout, as a data-parallel training would give it: for benchmarks."""

from collections.abc import Iterator
from pathlib import Path

_HEAD = """{
  "schemaVersion": 1,
  "deviceProperties": [{"id": 0, "name": "made up", "totalGlobalMem": 85018279936}],
  "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 8},
  "traceEvents": ["""
_FOOT = """
  ],
  "traceName": "made.json",
  "displayTimeUnit": "ms",
  "baseTimeNanoseconds": 1711964646000000000
}
"""
_EVENT = """
  {{
    "ph": "X", "cat": "{cat}", "name": "{name}", "pid": {pid}, "tid": {tid},
    "ts": {ts}, "dur": {dur},
    "args": {{
      {args}
    }}
  }}"""
_FLOW = """
  {{
    "ph": "{ph}", "id": {id}, "pid": {pid}, "tid": {tid}, "ts": {ts},
    "cat": "ac2g", "name": "ac2g"{more}
  }}"""
_SHAPES = (
    '"External id": {id},"Record function id": 0, "Concrete Inputs": ["", "", "", "False", "0.1"], '
    '"Input type": ["float", "float", "float", "Scalar", "Scalar"], "Input Strides": [[802816, 3136, 56, 1], '
    '[64], [64], [], []], "Input Dims": [[32, 64, 56, 56], [64], [64], [], []], "Ev Idx": {id}'
)
_LAUNCH = (
    '"External id": {id}, "queued": 0, "device": 0, "context": 1,\n      "stream": {stream}, '
    '"correlation": {id},\n      "registers per thread": 32, "shared memory": 0, "blocks per SM": 7.407407,'
    '\n      "warps per SM": 59.259,'
    '\n      "grid": [800, 1, 1], "block": [256, 1, 1], "est. achieved occupancy %": 100'
)
_KERNEL = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, at::detail::Array<"
    "char*, 3> >(int, at::native::CUDAFunctor_add<float>, at::detail::Array<char*, 3>)"
)
_COLLECTIVE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
_MAIN, _AUTOGRAD = 4000, 4001
_STEP = 600  # kernels


def write_trace(path: Path, nbytes: int) -> Path:
    """At least `nbytes` of it."""
    with path.open("w") as file:
        file.write(_HEAD)
        written, comma = 0, ""
        number = 0
        while written < nbytes:
            for text in _step(number):
                written += file.write(comma + text)
                comma = ","
            number += 1
        file.write(_FOOT)
    return path


def _step(number: int) -> Iterator[str]:
    """A kernel of 17 us is launched every 20 us, with every 50th a collective of 300 us beside it."""
    begin = 1_000 + number * _STEP * 20
    yield _event(
        "user_annotation", f"ProfilerStep#{number}", _MAIN, begin - 5, _STEP * 20, '"External id": 1'
    )
    for turn in range(_STEP):
        at, key = begin + 20 * turn, number * 2 * _STEP + 2 * turn + 2
        backward = turn >= _STEP // 3
        thread = _AUTOGRAD if backward else _MAIN
        name = "autograd::engine::evaluate_function: AddBackward0" if backward else "aten::add_"
        yield _event("cpu_op", name, thread, at - 4, 18, _SHAPES.format(id=key))
        yield from _launched(_KERNEL, thread, at, key, 7, at + 40, 17)
        if turn % 50 == 49:
            yield from _launched(_COLLECTIVE, thread, at + 5, key + 1, 20, at + 61, 300)


def _launched(
    name: str, thread: int, at: int, key: int, stream: int, start: int, duration: int
) -> Iterator[str]:
    call = f'"External id": {key}, "cbid": 211, "correlation": {key}'
    yield _event("cuda_runtime", "cudaLaunchKernel", thread, at, 4, call)
    yield _FLOW.format(ph="s", id=key, pid=_MAIN, tid=thread, ts=at, more="")
    kernel = _LAUNCH.format(id=key, stream=stream)
    yield _event("kernel", name, stream, start, duration, kernel, pid=0)
    yield _FLOW.format(ph="f", id=key, pid=0, tid=stream, ts=start, more=', "bp": "e"')


def _event(cat: str, name: str, tid: int, ts: int, dur: int, args: str, pid: int = _MAIN) -> str:
    return _EVENT.format(cat=cat, name=name, pid=pid, tid=tid, ts=ts, dur=dur, args=args)
