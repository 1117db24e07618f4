"""The rate of copies from pinned memory to a GPU: what the link gives under load."""

_BYTES = 64 << 20
_REPEATS = 8


def host_to_device(index: int) -> float:
    """Bytes per second of the best of some copies to CUDA device `index`."""
    import torch

    host = torch.empty(_BYTES, dtype=torch.uint8, pin_memory=True)
    with torch.cuda.device(index):
        device = torch.empty(_BYTES, dtype=torch.uint8, device="cuda")
        best = float("inf")
        for _ in range(_REPEATS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            device.copy_(host, non_blocking=True)
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end) / 1e3)
    return _BYTES / best
