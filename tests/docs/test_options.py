"""Every option is documented: each parameter of what users call stands in code font on its page."""

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

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
