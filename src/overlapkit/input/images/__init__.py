"""Images for training and evaluation, decoded ahead by DALI (extra `images`)."""

from overlapkit.input.images.loader import ImageLoader
from overlapkit.input.images.make import eval_loader, train_loader

__all__ = ["ImageLoader", "eval_loader", "train_loader"]
