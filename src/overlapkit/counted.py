"""A number and what is counted: 1 step, 2 steps."""


def counted(number: int, thing: str) -> str:
    """The number and the thing, in the plural unless it is one; of a word whose plural adds s or es."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}{'es' if thing.endswith('ch') else 's'}"
