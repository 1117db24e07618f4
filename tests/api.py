"""The public names and signatures, one a line: `python -m tests.api` writes them to tests/api.txt.

Public is what a package under overlapkit lists in its `__all__`. Annotations are left to mypy: Python's
versions print them differently.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import overlapkit

SNAPSHOT = Path(__file__).with_name("api.txt")


def packages() -> list[str]:
    """Every package that lists public names."""
    walked = pkgutil.walk_packages(overlapkit.__path__, "overlapkit.")
    found = ["overlapkit", *(one.name for one in walked if one.ispkg)]
    return sorted(name for name in found if getattr(importlib.import_module(name), "__all__", ()))


def lines() -> list[str]:
    """The whole interface."""
    out = []
    for package in packages():
        module = importlib.import_module(package)
        for name in module.__all__:
            out += described(f"{package}.{name}", getattr(module, name))
    return out


def described(name: str, value: Any) -> Iterator[str]:
    """A public object, and the public members of a class."""
    if inspect.ismodule(value):
        yield f"{name}: module"
    elif inspect.isclass(value):
        bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
        yield f"{name}{signature(value)}: class({bases})"
        for member in sorted(vars_of(value)):
            yield from member_of(f"{name}.{member}", inspect.getattr_static(value, member))
    elif callable(value):
        yield f"{name}{signature(value)}"
    else:
        yield f"{name} = {value!r}"


def vars_of(kind: type) -> set[str]:
    """Members that the class or a base of ours defines, and that are meant for users."""
    own = [base for base in kind.__mro__ if base.__module__.startswith("overlapkit")]
    return {member for base in own for member in vars(base) if not member.startswith("_")}


def member_of(name: str, member: Any) -> Iterator[str]:
    """A method, property or attribute."""
    if isinstance(member, property):
        yield f"{name}: property"
    elif isinstance(member, staticmethod | classmethod):
        yield f"{name}{signature(member.__func__)}: {type(member).__name__}"
    elif callable(member):
        yield f"{name}{signature(member)}"
    else:
        yield f"{name}: attribute"


def signature(function: Any) -> str:
    """Names, kinds and defaults; of an exception without a constructor of its own nothing."""
    if inspect.isclass(function) and function.__init__ in (Exception.__init__, RuntimeError.__init__):
        return ""
    found = inspect.signature(function)
    kept = [one.replace(annotation=inspect.Parameter.empty) for one in found.parameters.values()]
    return str(found.replace(parameters=kept, return_annotation=inspect.Signature.empty))


if __name__ == "__main__":
    SNAPSHOT.write_text("\n".join(lines()) + "\n")
