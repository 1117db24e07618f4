"""Names of tensors as the model itself gives them, without what wrappers put before them."""

from collections.abc import Iterable

from overlapkit.checkpoint.layout import plain_name

_DATA_PARALLEL = "module."


def own_names(names: Iterable[str]) -> dict[str, str]:
    """Each name -> the name without `_orig_mod.` anywhere, and without `module.` where all begin with it.

    Raises:
        ValueError: Two of them become the same.
    """
    own = {name: plain_name(name) for name in names}
    while own and all(name.startswith(_DATA_PARALLEL) for name in own.values()):
        own = {name: short.removeprefix(_DATA_PARALLEL) for name, short in own.items()}
    seen: dict[str, str] = {}
    for name, short in own.items():
        if (other := seen.setdefault(short, name)) != name:
            raise ValueError(
                f"the names {other!r} and {name!r} are the same without their wrappers' prefixes"
            )
    return own
