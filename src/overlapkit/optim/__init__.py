"""Lane 5: the optimizer and gradient clipping."""

from overlapkit.optim.clip import clip_by_global_norm_, clip_grad_norm_, global_norm
from overlapkit.optim.functional import adamw, adamw_state
from overlapkit.optim.in_backward import optimizer_in_backward
from overlapkit.optim.optimizer import AdamW

__all__ = [
    "AdamW",
    "adamw",
    "adamw_state",
    "clip_by_global_norm_",
    "clip_grad_norm_",
    "global_norm",
    "optimizer_in_backward",
]
