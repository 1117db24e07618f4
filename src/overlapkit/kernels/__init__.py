"""Lane 3, compute: fused kernels with the signatures of torch.nn.functional, and their modules."""

from overlapkit.kernels.autotune import Tuned, autotune
from overlapkit.kernels.cross_entropy import CrossEntropyLoss, cross_entropy
from overlapkit.kernels.rms_norm import RMSNorm, rms_norm
from overlapkit.kernels.swap import Swap, swap
from overlapkit.kernels.swiglu import SwiGLU, swiglu

__all__ = [
    "CrossEntropyLoss",
    "RMSNorm",
    "Swap",
    "SwiGLU",
    "Tuned",
    "autotune",
    "cross_entropy",
    "rms_norm",
    "swap",
    "swiglu",
]
