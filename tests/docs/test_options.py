"""Every option is documented: each parameter of what users call stands in code font on its page.

Where a table of options gives defaults, they are those of the signature.
"""

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

PAGES = {
    "checkpoint": ["checkpoint"],
    "doctor": ["doctor"],
    "input": ["input"],
    "input.images": ["input"],
    "kernels": ["kernels"],
    "measure": ["meter", "explain"],
    "optim": ["optim"],
    "parallel": ["parallel"],
    "plan": ["plan"],
}
"""The pages of each package; in this test all components of a package are on all of its pages."""

HANDED_OUT = {
    "checkpoint": "Contents Damage DamagedCheckpoint Difference Exported Listed Loaded Save "
    "TensorDifference TensorEntry",
    "doctor": "Diagnosis Line",
    "input": "PackedInputs PackedTokens",
    "input.images": "ImageLoader",
    "kernels": "Swap Tuned",
    "measure": "Comparison HangReport StepDetail StepRecord StepReport",
    "parallel": "Description Scale UnitRow",
    "plan": "Profile Scaling SimulatedReport UnitProfile",
}
"""Classes that the library makes and nobody else: their fields are results, told in the reference."""

PROTOCOLS = {
    "forward": "a module is called, its function's parameters are the page's",
    "is_over": "a source's, called by DeviceLoader",
    "iter_into": "a source's, called by DeviceLoader",
    "load_state_dict": "torch's own, called by Checkpointer",
    "samples": "a sampler's, called by DeviceLoader",
    "set_epoch": "torch's own",
}
"""Methods of which others decide how they are called."""


def public(package: str) -> Iterator[tuple[str, str]]:
    """Name of the component and of the parameter, for each one that a user gives."""
    module = importlib.import_module(f"overlapkit.{package}")
    for name in module.__all__:
        thing = getattr(module, name)
        if not callable(thing) or (inspect.isclass(thing) and issubclass(thing, Exception)):
            continue
        if name not in HANDED_OUT.get(package, "").split():
            yield from ((name, one) for one in inspect.signature(thing).parameters)
        for method, function in vars(thing).items() if inspect.isclass(thing) else ():
            if inspect.isfunction(function) and not _told_by_others(thing, method):
                parameters = list(inspect.signature(function).parameters)[1:]
                yield from ((f"{name}.{method}", one) for one in parameters)


def _told_by_others(owner: type, method: str) -> bool:
    torchs = [base for base in owner.__mro__[1:] if base.__module__.startswith("torch")]
    return method.startswith("_") or method in PROTOCOLS or any(hasattr(base, method) for base in torchs)


def in_code_font(page: str) -> set[str]:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return {word for span in re.findall(r"`([^`]+)`", text) for word in re.findall(r"\w+", span)}


@pytest.mark.parametrize("package", PAGES)
def test_every_parameter_is_on_the_page(package: str) -> None:
    told = set().union(*map(in_code_font, PAGES[package]))
    missing: dict[str, list[str]] = {}
    for component, parameter in public(package):
        if parameter not in told and not parameter.startswith("_"):
            missing.setdefault(component, []).append(parameter)
    assert missing == {}, f"add to docs/{PAGES[package][0]}.md, in code font"


def test_exceptions_are_there() -> None:
    for package, names in HANDED_OUT.items():
        assert set(names.split()) <= set(importlib.import_module(f"overlapkit.{package}").__all__)


def defaults(page: str) -> Iterator[tuple[str, str, str]]:
    """Head, option and shown default, of all tables whose second column is defaults."""
    head: list[str] = []
    for line in (ROOT / "docs" / f"{page}.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if not cells or not head:
            head = cells
        elif head[1:2] == ["default"] and cells[1].strip("-"):
            options = re.findall(r"`(\w+)`", cells[0])
            shown = re.split(r", (?![^(]*\))", cells[1])  # one for each, or one for all of a row
            for option, one in zip(options, shown if len(shown) > 1 else shown * len(options), strict=True):
                yield head[0], option, one.strip("`")


@pytest.mark.parametrize("page", ["checkpoint", "doctor", "input", "meter", "optim", "parallel", "plan"])
def test_defaults_on_the_page_are_those_of_the_signatures(page: str) -> None:
    modules = [
        importlib.import_module(f"overlapkit.{name}") for name, pages in PAGES.items() if page in pages
    ]
    things = {name: getattr(module, name) for module in modules for name in module.__all__}
    rows = list(defaults(page))
    assert len(rows) >= 8
    for head, option, shown in rows:
        signatures = [inspect.signature(things[name]).parameters for name in components(head)]
        have = [signature[option].default for signature in signatures if option in signature]
        assert have, f"{head} has no option {option}"
        assert have == [eval(shown, {"torch": torch})] * len(have), option
    text = (ROOT / "docs" / f"{page}.md").read_text()
    for head in {head for head, _, _ in rows}:  # such a table has every option
        _, _, table = text.partition(f"| {head} | default |")
        told = set(re.findall(r"`(\w+)`", table.partition("\n\n")[0])) | set(re.findall(r"\w+", head))
        for name in components(head):
            assert set(inspect.signature(things[name]).parameters) - told == set(), name


def components(head: str) -> list[str]:
    """What a table of options is about."""
    return re.findall(r"`(\w+)", head)
