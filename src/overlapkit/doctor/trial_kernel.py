"""Builds one small Triton kernel from nothing, and runs it where there is a GPU; a process of its own.

Says what it did as JSON on its last line of output. Run as `python -m overlapkit.doctor.trial_kernel`.
"""

import json
import sys
import time
from typing import Any

import torch
import triton
import triton.language as tl

_SIZE = 1000


@triton.jit  # type: ignore[untyped-decorator]
def double(source, target, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: D103
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < count) * 2, mask=at < count)


def run() -> dict[str, Any]:
    """Launch it on the GPU and check the result."""
    source = torch.arange(_SIZE, dtype=torch.float32, device="cuda")
    target = torch.zeros_like(source)
    double[(triton.cdiv(_SIZE, 128),)](source, target, _SIZE, BLOCK=128)
    if not torch.equal(target, source * 2):
        raise RuntimeError("the kernel's result is wrong")
    return {"ran": torch.cuda.get_device_name()}


def build() -> dict[str, Any]:
    """Compile it for a GPU that is not here."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    signature = {"source": "*fp32", "target": "*fp32", "count": "i32", "BLOCK": "constexpr"}
    compile(ASTSource(double, signature, {(3,): 128}), target=GPUTarget("cuda", 80, 32))
    return {"built": "sm_80"}


if __name__ == "__main__":
    began = time.perf_counter()
    try:
        said = run() if torch.cuda.is_available() else build()
        said["seconds"] = time.perf_counter() - began
    except Exception as error:  # whatever it is, the doctor's line says it
        said = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    print(json.dumps(said))
    sys.exit("error" in said)
