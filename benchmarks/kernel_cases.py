"""What benchmarks/kernels.py runs: each kernel beside the same function of its peers, and its floor in bytes.

A floor counts each input that is needed as read once, and each result as written once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from overlapkit import kernels

Function = Callable[..., Any]
HEADS, GROUPS, HEAD = 32, 8, 128  # rope's: Llama 3 8B's


@dataclass
class Case:
    """One kernel at one size.

    Attributes:
        inputs: What the functions are called with; what requires a gradient is differentiated.
        ours: Our function.
        peers: The same function by others, of the same inputs. `liger` is that of liger-kernel.
        needed: Which inputs a backward pass must read beside the outputs' gradients, by position; "y" is
            the first output.
        once: Forward and backward share one floor, each input read once: what in-place kernels could reach.
        limits: Goals for bytes over the floor, by part.
        passes: What must be moved over the floor, by part, where the design needs more than one pass.
    """

    inputs: list[Any]
    ours: Function
    peers: dict[str, Function]
    needed: Sequence[int | str]
    once: bool = False
    limits: dict[str, float] = field(default_factory=dict)
    passes: dict[str, float] = field(default_factory=dict)

    def leaves(self) -> list[Tensor]:
        return [x for x in self.inputs if isinstance(x, Tensor) and x.requires_grad]

    def floors(self, outputs: Sequence[Tensor]) -> dict[str, int]:
        """Bytes of the forward pass, of the backward pass and of both, at the least."""
        tensors = [x for x in self.inputs if isinstance(x, Tensor)]
        written = nbytes(*self.leaves())  # gradients are as large as what they are of
        if self.once:
            return {"both": nbytes(*tensors) + written}
        forward = nbytes(*tensors, *outputs)
        read = [outputs[0] if which == "y" else self.inputs[int(which)] for which in self.needed]
        backward = nbytes(*outputs, *read) + written
        return {"forward": forward, "backward": backward, "both": forward + backward}


def nbytes(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def normal(*shape: int, dtype: torch.dtype, device: torch.device, grad: bool = True) -> Tensor:
    return torch.randn(shape, device=device).to(dtype).requires_grad_(grad)


def norm_goals(d: int) -> dict[str, Any]:
    """Rows wider than 8,192 are read twice in backward: 5/3 there, 7/5 of both passes."""
    if d <= 8192:
        return {"limits": {"forward": 1.05, "backward": 1.05}}
    return {"limits": {"forward": 1.05, "backward": 1.70}, "passes": {"both": 7 / 5}}


def rms_norm(n: int, d: int, dtype: torch.dtype, device: torch.device) -> Case:
    x, w = normal(n, d, dtype=dtype, device=device), normal(d, dtype=dtype, device=device)
    return Case(
        [x, w],
        lambda x, w: kernels.rms_norm(x, w, 1e-6),
        {
            "torch": lambda x, w: F.rms_norm(x, (d,), w, 1e-6),
            "liger": lambda x, w: liger("rms_norm", "RMSNorm")(x, w, 1e-6, 0.0, "llama", False),
            "quack": lambda x, w: quack("rmsnorm")(x, w, eps=1e-6),
        },
        needed=(0, 1),
        **norm_goals(d),
    )


def add_rms_norm(n: int, d: int, dtype: torch.dtype, device: torch.device) -> Case:
    x, w = normal(n, d, dtype=dtype, device=device), normal(d, dtype=dtype, device=device)
    residual = normal(n, d, dtype=dtype, device=device, grad=False)  # its gradient is that of x
    return Case(
        [x, residual, w],
        lambda x, r, w: kernels.rms_norm(x, w, 1e-6, residual=r),
        {
            "torch": lambda x, r, w: (F.rms_norm(x + r, (d,), w, 1e-6), x + r),
            "liger": lambda x, r, w: liger("fused_add_rms_norm", "FusedAddRMSNorm")(
                x, r, w, 1e-6, 0.0, "llama", False
            ),
            "quack": lambda x, r, w: quack("rmsnorm")(x, w, residual=r, eps=1e-6, prenorm=True),
        },
        needed=(0, 2),  # the sum is needed, which is as large as x
        **norm_goals(d),
    )


def layer_norm(n: int, d: int, dtype: torch.dtype, device: torch.device) -> Case:
    x, w, b = (normal(*shape, dtype=dtype, device=device) for shape in ((n, d), (d,), (d,)))
    return Case(
        [x, w, b],
        lambda x, w, b: kernels.layer_norm(x, w, b, 1e-6),
        {
            "torch": lambda x, w, b: F.layer_norm(x, (d,), w, b, 1e-6),
            "liger": lambda x, w, b: liger("layer_norm", "LayerNorm")(x, w, b, 1e-6),
            "quack": lambda x, w, b: quack("layernorm")(x, w, b, eps=1e-6),
        },
        needed=(0, 1),
        **norm_goals(d),
    )


def swiglu(n: int, d: int, dtype: torch.dtype, device: torch.device) -> Case:
    gate, up = (normal(n, d, dtype=dtype, device=device) for _ in "gu")
    return Case(
        [gate, up],
        kernels.swiglu,
        {"torch": lambda g, u: F.silu(g) * u, "liger": lambda g, u: liger("swiglu", "SiLUMul")(g, u)},
        needed=(0, 1),
        limits={"forward": 1.05, "backward": 1.05},
    )


def swiglu_packed(n: int, d: int, dtype: torch.dtype, device: torch.device) -> Case:
    def torchs(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    return Case(
        [normal(n, 2 * d, dtype=dtype, device=device)],
        lambda x: kernels.swiglu_packed(x, "gate_up"),
        {"torch": torchs},
        needed=(0,),
        limits={"forward": 1.05, "backward": 1.05},
    )


def geglu(n: int, d: int, dtype: torch.dtype, device: torch.device) -> Case:
    gate, up = (normal(n, d, dtype=dtype, device=device) for _ in "gu")
    return Case(
        [gate, up],
        lambda g, u: kernels.geglu(g, u, "tanh"),
        {
            "torch": lambda g, u: F.gelu(g, approximate="tanh") * u,
            "liger": lambda g, u: liger("geglu", "GELUMul")(g, u),
        },
        needed=(0, 1),
        limits={"forward": 1.05, "backward": 1.05},
    )


def rope(n: int, d: int, dtype: torch.dtype, device: torch.device) -> Case:
    """Of n tokens with heads of Llama 3 8B; d is not asked for. Peers want tokens behind heads."""
    q = normal(1, n, HEADS, HEAD, dtype=dtype, device=device)
    k = normal(1, n, GROUPS, HEAD, dtype=dtype, device=device)
    angles = torch.outer(torch.arange(n), 5e5 ** -(torch.arange(0, HEAD, 2) / HEAD)).to(device)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)  # as peers want them
    twice = [torch.cat([a, a], -1)[None] for a in (cos, sin)]

    def torchs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        def turn(x: Tensor) -> Tensor:
            a, b = x.chunk(2, dim=-1)
            return x * twice[0][:, :, None] + torch.cat([-b, a], -1) * twice[1][:, :, None]

        return turn(q), turn(k)

    def ligers(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        heads_first = q.transpose(1, 2), k.transpose(1, 2)
        return tuple(x.transpose(1, 2) for x in liger("rope", "Rope")(*heads_first, *twice))

    return Case(
        [q, k, cos, sin],
        kernels.rope,
        {"torch": torchs, "liger": ligers},
        needed=(2, 3),
        limits={"forward": 1.05, "backward": 1.05},
    )


def softmax(n: int, d: int, dtype: torch.dtype, device: torch.device) -> Case:
    return Case(
        [normal(n, d, dtype=dtype, device=device)],
        kernels.softmax,
        {
            "torch": lambda x: F.softmax(x, -1),
            "liger": lambda x: liger("softmax", "Softmax")(x),
            "quack": lambda x: quack("softmax")(x),
        },
        needed=("y",),
    )


def dropout_add(n: int, d: int, dtype: torch.dtype, device: torch.device) -> Case:
    x = normal(n, d, dtype=dtype, device=device)
    residual = normal(n, d, dtype=dtype, device=device, grad=False)  # its gradient is that of the sum
    return Case(
        [x, residual],
        lambda x, r: kernels.dropout_add(x, r, 0.1, seed=1),
        {"torch": lambda x, r: F.dropout(x, 0.1) + r},
        needed=(),
    )


def cross_entropy(n: int, v: int, dtype: torch.dtype, device: torch.device) -> Case:
    logits, target = normal(n, v, dtype=dtype, device=device), torch.randint(v, (n,), device=device)
    return Case(
        [logits, target],
        kernels.cross_entropy,
        {
            "torch": lambda x, t: F.cross_entropy(x.float(), t),
            "liger": lambda x, t: liger("cross_entropy", "CrossEntropy")(alias(x), t, None)[0],
            "quack": lambda x, t: quack("cross_entropy")(x, t).mean(),
        },
        needed=(),
        once=True,
        limits={"both": 1.55},
        passes={"both": 1.5},
    )


def cross_entropy_(n: int, v: int, dtype: torch.dtype, device: torch.device) -> Case:
    case = cross_entropy(n, v, dtype, device)
    case.ours = lambda x, t: kernels.cross_entropy_(alias(x), t)
    if v <= 32_768:
        case.limits, case.passes = {"both": 1.05}, {}
    return case


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        return dx


def alias(x: Tensor) -> Tensor:
    """The same memory as a tensor that is no leaf: in-place kernels write there, and nothing is copied."""
    result: Tensor = _Alias.apply(x)
    return result


def liger(module: str, name: str) -> Function:
    """The autograd function of liger-kernel."""
    from importlib import import_module

    return getattr(import_module(f"liger_kernel.ops.{module}"), f"Liger{name}Function").apply  # type: ignore


def quack(name: str) -> Function:
    """The function of quack (quack-kernels)."""
    from importlib import import_module

    function: Function = getattr(import_module(f"quack.{name}"), name)
    return function


CASES: dict[str, Callable[[int, int, torch.dtype, torch.device], Case]] = {
    "rms_norm": rms_norm,
    "rms_norm with residual": add_rms_norm,
    "layer_norm": layer_norm,
    "swiglu": swiglu,
    "swiglu_packed": swiglu_packed,
    "geglu": geglu,
    "rope": rope,
    "softmax": softmax,
    "dropout_add": dropout_add,
    "cross_entropy": cross_entropy,
    "cross_entropy_": cross_entropy_,
}
"""Each by rows, columns, dtype and device."""
