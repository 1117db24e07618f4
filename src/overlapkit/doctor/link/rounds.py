"""Rounds of disjoint pairs: within a round every rank has one partner, so pairs are measured side by side."""


def rounds(world: int) -> list[list[tuple[int, int]]]:
    """Every pair of ranks exactly once, in as few rounds as there are (the circle method of tournaments).

    Args:
        world: Ranks, at least 2. Where they are odd in number one rests in each round.
    """
    circle: list[int | None] = [*range(world), *([None] if world % 2 else [])]
    found = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        matched = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in matched if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found
