"""What a model is made of, read from its module tree alone: repeated blocks, an embedding, a head.

Nothing here knows about ranks. Where the tree does not say enough, a module is left out, and
whatever is left out stays in the root unit, which is always right.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch.nn as nn

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True)
class Structure:
    """Module names, each group in the order of registration.

    Attributes:
        embedding: The largest embedding outside the blocks, where its weight is used nowhere else.
        blocks: The repeated blocks.
        head: The output projection after the blocks, behind the norm in front of it where there is one; or
            before the blocks, where it has a row for each word.
    """

    embedding: str | None
    blocks: tuple[str, ...]
    head: tuple[str, ...]


def find_structure(model: nn.Module) -> Structure:
    """Find the parts of a model that are worth a unit of their own.

    Without blocks there is nothing that communication could hide behind: then nothing is found.
    """
    blocks = tuple(_blocks(model, "") or _blocks(model, "", alone=True))
    if not blocks:
        return Structure(None, (), ())
    names = [name for name, _ in model.named_modules()]
    outside = [
        name
        for name, module in _leaves(model)
        if not any(name == block or name.startswith(block + ".") for block in blocks)
        if any(True for _ in module.parameters())
    ]
    after = set(names[names.index(blocks[-1]) :])
    head = _head(model, [name for name in outside if name in after]) or _vocabulary_projection(model, outside)
    return Structure(_embedding(model, outside, head), blocks, head)


def can_forward(module: nn.Module) -> bool:
    """Whether calling the module does anything; a ModuleList, for one, only holds others."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _leaves(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if name and next(module.children(), None) is None:
            yield name, module


def _blocks(module: nn.Module, prefix: str, alone: bool = False) -> list[str]:
    """Names of the outermost repeated blocks below `module`.

    Children of one list that share a class are blocks, whatever they hold: a mixture-of-experts block
    must not be taken apart, because an expert may stay idle on one rank. Stages, whose blocks run one after
    another, are taken apart. In a ModuleList the odd ones between repeated blocks are blocks as well; with
    `alone` so is an only child, which is what depth 1 looks like. Siblings outside of a list (an encoder and
    a decoder), and lists in lists, are blocks only where nothing inside them repeats.
    """
    in_list = isinstance(module, _LISTS)
    children = list(module.named_children())
    fit = {name for name, child in children if _may_be_block(child, in_list)}
    seen = Counter(type(child) for name, child in children if name in fit)
    holder = in_list and not isinstance(module, nn.Sequential)
    repeated = {kind for kind, times in seen.items() if times > 1}
    found: list[str] = []
    for name, child in children:
        repeats = name in fit and (
            type(child) in repeated
            or (holder and _composite(child) and (bool(repeated) or (alone and len(module._modules) == 1)))
        )
        if repeats and in_list and not isinstance(child, _LISTS) and not _is_stage(child, children):
            found.append(prefix + name)
            continue
        inner = _blocks(child, f"{prefix}{name}.", alone)
        found.extend(inner or ([prefix + name] if repeats else []))
    return found


def _may_be_block(module: nn.Module, in_list: bool) -> bool:
    """A block does work worth hiding behind: it holds a matrix. Outside of lists it is also composite,
    or every q, k, v of a single attention would be one.
    """  # noqa: D205
    return _matrices(module) > 0 and can_forward(module) and (in_list or _composite(module))


def _composite(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _is_stage(module: nn.Module, siblings: list[tuple[str, nn.Module]]) -> bool:
    """Whether nearly all of a module is one list of blocks that run in turn.

    A Sequential's do. A ModuleList's may be experts, but then the siblings that have such a list are alike;
    stages differ in depth or width.
    """
    inner = _inner_list(module)
    if inner is None or isinstance(inner, nn.Sequential):
        return inner is not None
    others = [
        child for _, child in siblings if type(child) is type(module) and _inner_list(child) is not None
    ]
    return len({_elements(other) for other in others}) > 1


def _inner_list(module: nn.Module) -> nn.Module | None:
    """The child that is a list of alike modules, where it holds four fifths of the parameters.

    With one matrix each they are the layers of a block, not blocks.
    """
    for child in module.children():
        if not isinstance(child, _LISTS) or 5 * _elements(child) < 4 * _elements(module):
            continue
        kinds = [
            type(each) for each in child.children() if _may_be_block(each, False) and _matrices(each) > 1
        ]
        if len(kinds) > 1 and len(set(kinds)) == 1:
            return child
    return None


def _matrices(module: nn.Module) -> int:
    return sum(parameter.ndim > 1 for parameter in module.parameters())


def _elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _head(model: nn.Module, after: list[str]) -> tuple[str, ...]:
    """The last projection after the blocks, behind a norm that directly precedes it."""
    for place in range(len(after) - 1, -1, -1):
        module = model.get_submodule(after[place])
        if isinstance(module, nn.Embedding) or all(parameter.ndim < 2 for parameter in module.parameters()):
            continue
        if place and all(p.ndim < 2 for p in model.get_submodule(after[place - 1]).parameters()):
            return after[place - 1], after[place]
        return (after[place],)
    return ()


def _vocabulary_projection(model: nn.Module, outside: list[str]) -> tuple[str, ...]:
    """The head of a model that registers it before the blocks: no other matrix has a row for each word."""
    tables = [model.get_submodule(name) for name in outside]
    words = max((table.num_embeddings for table in tables if isinstance(table, nn.Embedding)), default=0)
    for name in outside:
        module = model.get_submodule(name)
        if words and isinstance(module, nn.Linear) and module.out_features >= words:
            return (name,)
    return ()


def _embedding(model: nn.Module, outside: list[str], head: tuple[str, ...]) -> str | None:
    """The largest embedding, if the head is a vocabulary projection with a weight of its own.

    Without one, forward may well use the embedding's weight as the output projection. Then it must
    stay gathered all through forward, as only the root unit does.
    """
    tables = {
        name: module for name in outside if isinstance(module := model.get_submodule(name), nn.Embedding)
    }
    if not tables or not head:
        return None
    name = max(tables, key=lambda name: tables[name].weight.numel())
    projection = getattr(model.get_submodule(head[-1]), "weight", None)
    if projection is None or projection is tables[name].weight:
        return None
    return name if projection.shape[0] >= tables[name].num_embeddings else None
