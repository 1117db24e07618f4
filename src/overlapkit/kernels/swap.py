"""swap: give the modules of a model their fused forward, in place, and take it back on request."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from overlapkit.kernels.cross_entropy import CrossEntropyLoss
from overlapkit.kernels.rms_norm import RMSNorm

_FUSED: dict[type[nn.Module], type[nn.Module]] = {
    nn.RMSNorm: RMSNorm,
    nn.CrossEntropyLoss: CrossEntropyLoss,
}


@dataclass
class Swap:
    """What `swap` did.

    Attributes:
        changed: Names of the modules that run fused now, as in model.named_modules().
        skipped: Name to reason, for modules that look as if they could but were left alone.
    """

    changed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    _modules: list[tuple[str, nn.Module, type[nn.Module]]] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Give every changed module its former class back. Calling it twice does no harm.

        Raises:
            RuntimeError: A module was given another class since (fully_shard does so). Nothing is undone.
        """
        for name, module, former in self._modules:
            if type(module) is not _FUSED[former]:
                raise RuntimeError(
                    f"{name!r} became a {type(module).__name__} after the swap: undo before fully_shard "
                    "and other wrappers, or build the model anew"
                )
        for _, module, former in self._modules:
            module.__class__ = former
        self._modules.clear()
        self.changed.clear()

    def __str__(self) -> str:
        if not self.changed and not self.skipped:
            return "nothing to swap: the model holds no nn.RMSNorm and no nn.CrossEntropyLoss"
        lines = [f"{len(self.changed)} modules run fused: {', '.join(map(repr, self.changed)) or 'none'}"]
        lines += [f"skipped {name!r}: {reason}" for name, reason in self.skipped.items()]
        return "\n".join(lines)


def swap(model: nn.Module, *, only: Iterable[str] | None = None) -> Swap:
    """Make every nn.RMSNorm and nn.CrossEntropyLoss of a model run its fused kernel.

    Each instance changes its class to the subclass of this package, and nothing else: parameters,
    hooks, the train/eval flag, names and references to it stay as they are, so an optimizer or an FSDP2
    parent that exists already stays valid. No class and no library is patched. A later version will find
    gated feed-forward layers and the norms of transformers' models; until then call `swiglu` in them.

    Call it before torch.compile, and before fully_shard where a norm is sharded as a unit of its own.

    Args:
        model: Any module; it is changed in place and may itself be one of those.
        only: Names of modules, with wildcards (fnmatch): ["blocks.*.norm1"]. None for all.

    Raises:
        TypeError: model is no nn.Module, or only is no list of strings.
        ValueError: A name in only matches no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: pass a torch.nn.Module")
    if isinstance(only, str):
        raise TypeError(f"only={only!r} is one string: pass a list of names, [{only!r}]")
    if only is not None and not isinstance(only, Iterable):
        raise TypeError(f"only={only!r}: pass a list of names, or None for all")
    named = dict(model.named_modules())
    for pattern in (patterns := None if only is None else list(only)) or ():
        if not isinstance(pattern, str):
            raise TypeError(f"only holds {pattern!r}: pass names of modules")
        if not any(fnmatchcase(name, pattern) for name in named):
            raise ValueError(f"only={pattern!r} matches no module: the names are those of named_modules()")
    result = Swap()
    for name, module in named.items():
        if patterns is not None and not any(fnmatchcase(name, pattern) for pattern in patterns):
            continue
        former = type(module)
        if reason := _why_not(module):
            result.skipped[name] = reason
        elif former in _FUSED:
            module.__class__ = _FUSED[former]
            result.changed.append(name)
            result._modules.append((name, module, former))
    return result


def _why_not(module: nn.Module) -> str | None:
    """Why a module that looks like one of ours is left alone; None for one of ours and for all others."""
    kind = type(module)
    if type(module) is nn.RMSNorm and len(module.normalized_shape) != 1:
        return f"normalized_shape={module.normalized_shape} spans several dimensions"
    if kind in _FUSED:
        return "its instance has a forward of its own" if "forward" in vars(module) else None
    if kind in _FUSED.values():
        return "it runs fused already"
    if any(base.__name__ == "FSDPModule" for base in kind.__mro__) and isinstance(module, tuple(_FUSED)):
        return "it is an FSDP2 unit of its own: call kernels.swap before fully_shard"
    if isinstance(module, tuple(_FUSED)):
        return f"{kind.__name__} is a subclass, whose forward may differ"
    if kind is nn.LayerNorm:
        return "there is no kernel for nn.LayerNorm yet"
    if kind.__name__.endswith("RMSNorm"):
        return f"{kind.__name__} is not torch.nn.RMSNorm: call kernels.rms_norm in its forward"
    return None
