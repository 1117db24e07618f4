"""Measured links: collectives by message size, pairs of ranks, each rank's own pace, and what that says."""
