"""Lane 3, compute: fused kernels with the signatures of torch.nn.functional, and their modules."""

from overlapkit.kernels.cross_entropy import CrossEntropyLoss, cross_entropy
from overlapkit.kernels.dropout_add import dropout_add
from overlapkit.kernels.layer_norm import LayerNorm, layer_norm
from overlapkit.kernels.rms_norm import RMSNorm, rms_norm
from overlapkit.kernels.softmax import softmax
from overlapkit.kernels.swap import Swap, swap
from overlapkit.kernels.swiglu import SwiGLU, swiglu

__all__ = [
    "CrossEntropyLoss",
    "LayerNorm",
    "RMSNorm",
    "Swap",
    "SwiGLU",
    "cross_entropy",
    "dropout_add",
    "layer_norm",
    "rms_norm",
    "softmax",
    "swap",
    "swiglu",
]
