"""load_pretrained: Hugging Face's safetensors into a model, each rank reading only its own bytes."""

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from overlapkit.checkpoint.box import local_part
from overlapkit.checkpoint.errors import MismatchError
from overlapkit.checkpoint.exchange.casting import castable
from overlapkit.checkpoint.exchange.pretrained_files import find_tensors
from overlapkit.checkpoint.exchange.pretrained_fill import Job, fill
from overlapkit.checkpoint.exchange.safetensors_file import Stored
from overlapkit.checkpoint.layout import plain_name, unwrap
from overlapkit.checkpoint.opening import check_path
from overlapkit.meta_device import materialise, on_meta

Rename = Callable[[str], str | None]


@dataclass(frozen=True)
class Loaded:
    """What `load_pretrained` has done.

    Attributes:
        missing: The model's names that the files have no value for; they keep what they had.
        unexpected: The names in the files, renamed, that the model does not have.
        nbytes: What this rank has read.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    nbytes: int


@dataclass
class _Match:
    """Which tensor in the files goes where.

    Attributes:
        pairs: The model's name and what the files have under it. Tied names come one after the other.
        missing: Names that the files lack.
        unexpected: Names that the model lacks.
        unfit: What is there and does not fit, in words, by the model's name.
    """

    pairs: dict[str, Stored] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    unfit: dict[str, str] = field(default_factory=dict)


def load_pretrained(
    model: nn.Module,
    source: str | os.PathLike[str],
    *,
    strict: bool = True,
    rename: Rename | None = None,
    dtype: Literal["same", "cast"] = "same",
    device: torch.device | str | int | None = None,
) -> Loaded:
    """Load pretrained weights in Hugging Face's layout, in place, into a model that may be sharded.

    The model may be on the meta device, whole or in part, sharded by `fully_shard` or not: what is there gets
    memory here. Each rank reads the bytes of its own shards, and no others. Ranks do not talk to each other,
    so that some of them may call this alone. Memory beside the model is 16 MiB, or four rows of a tensor.

    Names, shapes, dtypes and the files' headers are checked before anything is changed. A file that cannot be
    read on later leaves the model with a part of its values. Extra state (`get_extra_state`) is left alone.

    Args:
        model: A module; wrappers (DistributedDataParallel, torch.compile) make no difference.
        source: A folder with `model.safetensors`, or with `model.safetensors.index.json` and its files; or
            one such file.
        strict: Raise where names are missing or unexpected or shapes or dtypes differ; otherwise warn, and
            load what fits. A name is not missing where the model ties it to another one that is there.
        rename: Turns a name in the files into the model's; None in its place leaves that tensor out. Such
            as `lambda name: name.removeprefix("model.")`.
        dtype: "same": another dtype in the files than in the model is an error. "cast": it is cast, between
            floating-point dtypes of 16 bits and more.
        device: Where what is on the meta device gets its memory; None is the mesh's kind of device, without
            a mesh the current accelerator, else the CPU.

    Returns:
        What was missing and unexpected, and how many bytes were read.

    Raises:
        FileNotFoundError: There are no such files.
        DamagedCheckpoint: A file is cut short, contradicts itself or the index, or the index leads out of
            its folder.
        MismatchError: The weights do not fit; the message lists all names. Also where something on the meta
            device would be left without a value: a name that is missing, a buffer that is not saved.
        ValueError: An argument is wrong, or a value is too large for the model's dtype.
        NotImplementedError: The source is a URL.
    """
    module = _check(model, dtype, rename, device)
    check_path("source", source, "copy the weights here first")
    match = _match(module, _renamed(find_tensors(Path(source)), rename), dtype)
    _judge(match, module, Path(source), strict)
    jobs = _jobs(module, match)  # once before anything is changed: it may raise
    if on_meta(module):
        materialise(module, device)
        jobs = _jobs(module, match)
    return Loaded(tuple(match.missing), tuple(match.unexpected), fill(jobs))


def _check(model: object, dtype: str, rename: object, device: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: give a torch.nn.Module")
    if dtype not in ("same", "cast"):
        raise ValueError(f"dtype={dtype!r}: give 'same' or 'cast'; weights take the model's dtype")
    if rename is not None and not callable(rename):
        raise TypeError(f"rename is a {type(rename).__name__}: give a function, such as a dict's .get")
    module = unwrap(model)
    if device is not None and not on_meta(module):
        raise ValueError(f"device={device!r}: nothing of the model is on the meta device; use model.to()")
    return module


def _renamed(found: dict[str, Stored], rename: Rename | None) -> dict[str, Stored]:
    made: dict[str, Stored] = {}
    for old, stored in found.items():
        new = rename(old) if rename is not None else old
        if new is None:
            continue
        if new in made:
            raise ValueError(f"rename: {made[new].name!r} and {old!r} both become {new!r}")
        made[new] = stored
    return made


def _targets(module: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that a state_dict saves, live, by name; FSDP2 shows its shards."""
    state = module.state_dict(keep_vars=True)
    return {
        plain_name(name): tensor
        for name, tensor in state.items()
        if isinstance(tensor, torch.Tensor) and name.rsplit(".", 1)[-1] != "_extra_state"
    }


def _match(module: nn.Module, found: dict[str, Stored], dtype: str) -> _Match:
    targets, match = _targets(module), _Match()
    match.unexpected += [name for name in found if name not in targets]
    ties: dict[int, list[str]] = {}
    for name, tensor in targets.items():
        ties.setdefault(id(tensor), []).append(name)
    for names in ties.values():
        there = [name for name in names if name in found]
        match.missing += names if not there else []
        for name in there:
            if (why := _unfit(targets[name], found[name], dtype)) is not None:
                match.unfit[name] = f"mismatch: {name!r} {why}"
            else:
                match.pairs[name] = found[name]
    return match


def _unfit(target: torch.Tensor, stored: Stored, dtype: str) -> str | None:
    if tuple(target.shape) != stored.shape:
        return f"is {tuple(target.shape)}, in the file {stored.shape}"
    if stored.dtype == target.dtype:
        return None
    kind = stored.kind if stored.dtype is None else stored.dtype
    if stored.dtype is None or not (castable(stored.dtype) and castable(target.dtype)):
        return f"is {target.dtype}, in the file {kind}, which cannot be cast to it"
    return None if dtype == "cast" else f"is {target.dtype}, in the file {kind}; dtype='cast' casts it"


def _judge(match: _Match, module: nn.Module, source: Path, strict: bool) -> None:
    """Raise, or warn, where the weights do not fit.

    Raises:
        MismatchError: They do not, and `strict`, or something would be left without a value.
    """
    problems = [f"missing: {name!r}" for name in match.missing]
    problems += [f"unexpected: {name!r}" for name in match.unexpected]
    problems += match.unfit.values()
    ties = {id(tensor) for name, tensor in _targets(module).items() if name in match.pairs}
    empty = [name for name, tensor in on_meta(module).items() if id(tensor) not in ties]
    if empty:
        problems += [f"without a value: {plain_name(name)!r} is on the meta device" for name in empty]
        problems.append(
            "give these memory and values first: build a buffer on a real device, or call to_empty(), which "
            "unties weights, and initialise"
        )
    if problems and (strict or empty):
        lines = "".join(f"\n    {problem}" for problem in problems)
        raise MismatchError(f"{source} does not fit the model; rename= translates names:{lines}")
    if problems:
        warnings.warn(f"{source} does not fit the model in full: {'; '.join(problems)}", stacklevel=3)


def _jobs(module: nn.Module, match: _Match) -> list[Job]:
    targets = _targets(module)
    jobs: dict[int, Job] = {}
    for name, stored in match.pairs.items():
        target = targets[name]
        if id(target) not in jobs:
            jobs[id(target)] = Job(*local_part(target, name), [])
        jobs[id(target)].sources.append(stored)
    return list(jobs.values())
