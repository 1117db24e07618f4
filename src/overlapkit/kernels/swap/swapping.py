"""swap: give the modules of a model their fused forward, in place, and take it back on request."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from overlapkit.counted import counted
from overlapkit.kernels.cross_entropy import CrossEntropyLoss
from overlapkit.kernels.layer_norm import LayerNorm
from overlapkit.kernels.rms_norm import RMSNorm
from overlapkit.kernels.swap.fused import Fused, Norm, fused
from overlapkit.kernels.swap.probe import candidates, choose

_OF_TORCH: dict[type[nn.Module], type[nn.Module]] = {
    nn.CrossEntropyLoss: CrossEntropyLoss,
    nn.LayerNorm: LayerNorm,
    nn.RMSNorm: RMSNorm,
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
    _modules: list[tuple[str, nn.Module, type[nn.Module], type[nn.Module]]] = field(
        default_factory=list, repr=False
    )

    def undo(self) -> None:
        """Give every changed module its former class back. Calling it twice does no harm.

        Raises:
            RuntimeError: A module was given another class since (fully_shard does so). Nothing is undone.
        """
        for name, module, _, now in self._modules:
            if type(module) is not now:
                raise RuntimeError(
                    f"{name!r} became a {type(module).__name__} after the swap: undo before fully_shard "
                    "and other wrappers, or build the model anew"
                )
        for _, module, former, _ in self._modules:
            module.__class__ = former
        self._modules.clear()
        self.changed.clear()

    def __str__(self) -> str:
        if not self.changed and not self.skipped:
            return "nothing to swap: the model holds no norm, gated layer or loss that there is a kernel for"
        run = "runs" if len(self.changed) == 1 else "run"
        names = ", ".join(map(repr, self.changed)) or "none"
        lines = [f"{counted(len(self.changed), 'module')} {run} fused: {names}"]
        lines += [f"skipped {name!r}: {reason}" for name, reason in self.skipped.items()]
        return "\n".join(lines)


def swap(model: nn.Module, *, only: Iterable[str] | None = None) -> Swap:
    """Make the norms, gated feed-forward layers and losses of a model run their fused kernels.

    torch's RMSNorm, LayerNorm, CrossEntropyLoss and LinearCrossEntropyLoss become subclasses of them.
    Modules of other libraries and your own (the norms and feed-forward layers of transformers' Llama, Qwen,
    Mistral, Gemma, Phi and their like) are found by structure, whatever their classes are called: a leaf
    with a weight and an eps, or two or three linear layers whose sizes fit. Such a module is taken if its
    own forward gives the same numbers as a kernel's, in training and in evaluation: run over small stand-
    ins for its weights on the CPU, so sharded modules and those on the meta device are checked, too, and
    each takes some milliseconds. Not seen is a forward that depends on its dtype, device or sizes, or a
    dropout whose p is raised from 0 later. In bfloat16 and float16 results differ in the last digit, since
    intermediate results are not rounded, and a loss is float32; of a loss's ways see `cross_entropy`.

    Each instance changes its class to a subclass of its own, and nothing else: parameters, hooks, the
    train/eval flag, names and references to it stay as they are, so an optimizer or an FSDP2 parent that
    exists already stays valid; copies and pickles stay fused. No class and no library is patched. Rotary
    embeddings are functions in those libraries, not modules: `skipped` names them, call `rope` there.

    Call it before torch.compile, and before fully_shard where such a module is sharded as a unit of its own.

    Args:
        model: Any module; it is changed in place and may itself be one of those.
        only: Names of modules, with wildcards (fnmatch): ["blocks.*.norm1"]. None for all.

    Raises:
        TypeError: model is no nn.Module, or only is no list of strings.
        ValueError: A name in only matches no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: pass a torch.nn.Module")
    named = dict(model.named_modules())
    patterns = None if only is None else _patterns(only, named)
    result = Swap()
    for name, module in named.items():
        if patterns is not None and not any(fnmatchcase(name, pattern) for pattern in patterns):
            continue
        now = _fused_class(module)
        if isinstance(now, str):
            result.skipped[name] = now
        elif now is not None:
            result._modules.append((name, module, type(module), now))
            module.__class__ = now
            result.changed.append(name)
    return result


def _patterns(only: Iterable[str], named: Iterable[str]) -> list[str]:
    """The patterns, each of which matches something."""
    if isinstance(only, str):
        raise TypeError(f"only={only!r} is one string: pass a list of names, [{only!r}]")
    if not isinstance(only, Iterable):
        raise TypeError(f"only={only!r}: pass a list of names, or None for all")
    patterns = list(only)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"only holds {pattern!r}: pass names of modules")
        if not any(fnmatchcase(name, pattern) for name in named):
            raise ValueError(f"only={pattern!r} matches no module: the names are those of named_modules()")
    return patterns


def _fused_class(module: nn.Module) -> type[nn.Module] | str | None:
    """The class that a module gets; a string says why it gets none, None that it does not look like ours."""
    kind, of_torch = type(module), _OF_TORCH
    if isinstance(module, getattr(nn, "LinearCrossEntropyLoss", ())):  # torch has it since 2.13
        from overlapkit.kernels.swap import linear_loss

        if reason := linear_loss.why_not(module):
            return reason
        of_torch = linear_loss.OF_TORCH
    if kind in of_torch.values() or issubclass(kind, Fused):
        return "it runs fused already"
    found = candidates(module)
    if not (found or isinstance(module, tuple(of_torch))):
        return _of_another_form(module)
    if any(base.__name__ == "FSDPModule" for base in kind.__mro__):
        return "it is an FSDP2 unit of its own: call kernels.swap before fully_shard"
    if "forward" in vars(module):
        return "its instance has a forward of its own"
    if kind in of_torch:
        return of_torch[kind]
    if not found:
        return f"{kind.__name__} is a subclass, whose forward may differ"
    how = choose(module, found)
    if not isinstance(how, str):
        return fused(kind, how)
    return how if isinstance(found[0], Norm) or _called_like_one(module) else None


def _of_another_form(module: nn.Module) -> str | None:
    """Why a module is left alone that has the purpose of one of ours, but not its form."""
    kind = type(module)
    if any("inv_freq" in name for name in module._buffers):
        return "rotary embeddings are applied by a function, not by a module: call kernels.rope there"
    if "gate_up_proj" in module._parameters:
        return "its experts share one parameter: call kernels.swiglu_packed or geglu_packed in its forward"
    if kind.__name__.endswith("RMSNorm"):
        return (
            f"{kind.__name__} has not an RMSNorm's form, one weight and an eps: call kernels.rms_norm in it"
        )
    return None


def _called_like_one(module: nn.Module) -> bool:
    """Whether a name says so: three linear layers may be many other things."""
    names = " ".join((type(module).__name__, *module._modules)).lower()
    return any(word in names for word in ("gate", "glu", "mlp", "feedforward"))
