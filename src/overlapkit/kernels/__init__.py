"""Lane 3, compute: fused kernels with the signatures of torch.nn.functional, and their modules."""

from overlapkit.kernels.cross_entropy import CrossEntropyLoss, cross_entropy
from overlapkit.kernels.cross_entropy_inplace import cross_entropy_
from overlapkit.kernels.linear_cross_entropy import LinearCrossEntropyLoss, linear_cross_entropy
from overlapkit.kernels.rms_norm import RMSNorm, rms_norm
from overlapkit.kernels.swap import Swap, swap
from overlapkit.kernels.swiglu import SwiGLU, swiglu

__all__ = [
    "CrossEntropyLoss",
    "LinearCrossEntropyLoss",
    "RMSNorm",
    "Swap",
    "SwiGLU",
    "cross_entropy",
    "cross_entropy_",
    "linear_cross_entropy",
    "rms_norm",
    "swap",
    "swiglu",
]
