"""Lane 3, compute: fused kernels with the signatures of torch.nn.functional, and their modules."""

from typing import TYPE_CHECKING

from overlapkit import _lazily
from overlapkit.kernels.autotune import Tuned, autotune
from overlapkit.kernels.cross_entropy import CrossEntropyLoss, cross_entropy
from overlapkit.kernels.cross_entropy_inplace import cross_entropy_
from overlapkit.kernels.dropout_add import dropout_add
from overlapkit.kernels.gated import GeGLU, SwiGLU, geglu, geglu_packed, swiglu, swiglu_packed
from overlapkit.kernels.layer_norm import LayerNorm, layer_norm
from overlapkit.kernels.rms_norm import RMSNorm, rms_norm
from overlapkit.kernels.rope import rope
from overlapkit.kernels.rotary import RotaryEmbedding
from overlapkit.kernels.softmax import softmax
from overlapkit.kernels.swap import Swap, swap

if TYPE_CHECKING:
    from overlapkit.kernels.linear_head import LinearCrossEntropyLoss, linear_cross_entropy

__all__ = [
    "CrossEntropyLoss",
    "GeGLU",
    "LayerNorm",
    "LinearCrossEntropyLoss",
    "RMSNorm",
    "RotaryEmbedding",
    "Swap",
    "SwiGLU",
    "Tuned",
    "autotune",
    "cross_entropy",
    "cross_entropy_",
    "dropout_add",
    "geglu",
    "geglu_packed",
    "layer_norm",
    "linear_cross_entropy",
    "rms_norm",
    "rope",
    "softmax",
    "swap",
    "swiglu",
    "swiglu_packed",
]

__getattr__ = _lazily(  # torch's flop counter, to which it gives its formulas, imports Triton
    __name__, {"LinearCrossEntropyLoss": "linear_head", "linear_cross_entropy": "linear_head"}
)
