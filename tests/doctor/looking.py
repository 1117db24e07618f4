"""Runs all checks on a machine that is not here; what would touch this one is replaced."""

from collections.abc import Callable, Sequence

from overlapkit.doctor.disk_trial import Reading, Written
from overlapkit.doctor.examine import all_checks
from overlapkit.doctor.layers import kernels, path
from overlapkit.doctor.layers.storage import Folders, Trials
from overlapkit.doctor.line import Line
from overlapkit.doctor.watch import Watch
from tests.doctor.trees import Node


def trials(write: float = 2e9, sync: float = 0.001, read: float = 1e9) -> Trials:
    """Storage of these rates, in bytes per second."""
    return Trials(lambda folder: Written(write, sync), lambda folder, share: Reading(int(read), 1.0))


def look(
    node: Node,
    *,
    rates: Callable[[int], float] = lambda index: 50e9,
    between: Callable[[], object] = lambda: None,
    workers: int | None = None,
) -> list[Line]:
    """All lines.

    Args:
        node: The machine.
        rates: Bytes per second of copies to each GPU.
        between: Happens while counters are watched.
        workers: `num_workers`.
    """
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        between()

    watch = Watch(node.tree.machine(), lambda: now[0], sleep)
    subject = node.subject()
    replaced = {
        ("kernels", "compiler"): lambda s: kernels.compiler(s, lambda env: {"ran": "H100", "seconds": 1.0}),
        ("path", "copies"): lambda s: path.copies(s, rates),
        ("fabric", "hostname"): lambda s: (),
    }
    found = []
    for check in all_checks(Folders(None, None), trials(), {}, watch, 2.0, workers):
        look = replaced.get((check.layer.name, check.name), check.look)
        found += check._replace(look=look).run(subject)
    return found


def weak(lines: Sequence[Line]) -> list[tuple[str, str, str]]:
    """What is weak, as (layer, name, what was seen)."""
    return [(line.layer, line.name, line.saw) for line in lines if line.state == "weak"]


def named(lines: Sequence[Line], layer: str, name: str) -> Line:
    """The one line of that name."""
    (found,) = [line for line in lines if (line.layer, line.name) == (layer, name)]
    return found
