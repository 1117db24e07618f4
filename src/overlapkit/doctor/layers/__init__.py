"""The layers that a step stands on, a file each: what to look at, and what is weak about it."""
