"""Checkpoints on object stores, alone or behind a local directory."""
