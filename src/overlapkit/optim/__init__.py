"""Lane 5: the optimizer and gradient clipping."""

from overlapkit.optim.adamw import AdamW
from overlapkit.optim.clip import clip_by_global_norm_, clip_grad_norm_, global_norm

__all__ = ["AdamW", "clip_by_global_norm_", "clip_grad_norm_", "global_norm"]
