"""Lane 3, compute: fused kernels with the signatures of torch.nn.functional, and their modules."""

from overlapkit.kernels.autotune import Tuned, autotune
from overlapkit.kernels.cross_entropy import CrossEntropyLoss, cross_entropy
from overlapkit.kernels.dropout_add import dropout_add
from overlapkit.kernels.gated import GeGLU, SwiGLU, geglu, geglu_packed, swiglu, swiglu_packed
from overlapkit.kernels.layer_norm import LayerNorm, layer_norm
from overlapkit.kernels.rms_norm import RMSNorm, rms_norm
from overlapkit.kernels.rope import rope
from overlapkit.kernels.rotary import RotaryEmbedding
from overlapkit.kernels.softmax import softmax
from overlapkit.kernels.swap import Swap, swap

__all__ = [
    "CrossEntropyLoss",
    "GeGLU",
    "LayerNorm",
    "RMSNorm",
    "RotaryEmbedding",
    "Swap",
    "SwiGLU",
    "Tuned",
    "autotune",
    "cross_entropy",
    "dropout_add",
    "geglu",
    "geglu_packed",
    "layer_norm",
    "rms_norm",
    "rope",
    "softmax",
    "swap",
    "swiglu",
    "swiglu_packed",
]
