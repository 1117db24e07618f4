"""Weights out to and in from Hugging Face's layout; states in from torch.save and DCP."""
