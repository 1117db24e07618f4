"""Which checkpoints stay."""

from collections.abc import Iterable


def surplus(steps: Iterable[int], newest: int, keep: int | None, keep_every: int | None) -> list[int]:
    """The steps to delete, ascending.

    Args:
        steps: All committed, sound checkpoints.
        newest: The step just committed: it stays, even when higher steps of an abandoned branch are there.
        keep: How many of the highest steps stay; None keeps all.
        keep_every: Multiples of this stay for ever.
    """
    if keep is None:
        return []
    ordered = sorted(steps)
    stay = {newest, *ordered[-keep:]}
    if keep_every is not None:
        stay |= {step for step in ordered if step % keep_every == 0}
    return [step for step in ordered if step not in stay]
