"""The public interface changes on purpose: it stands, with all signatures, in tests/api.txt."""

import difflib

from tests import api


def test_the_public_interface_is_the_one_written_down():
    there, here = api.SNAPSHOT.read_text().splitlines(), api.lines()
    changes = list(difflib.unified_diff(there, here, "tests/api.txt", "src", lineterm="", n=0))
    assert not changes, "\n".join(
        [*changes, "If that is meant: python -m tests.api, commit tests/api.txt, and say so in CHANGELOG.md"]
    )


def test_nothing_in_it_depends_on_the_machine():
    text = "\n".join(api.lines())
    assert " at 0x" not in text
    assert "/work" not in text
    for expected in (
        "overlapkit.DeviceLoader(source, device=None, *, depth=2,",
        "overlapkit.Checkpointer.save(self, step, state, *, metrics=None, block=False)",
        "overlapkit.measure.HANG_EXIT_CODE = 87",
        "overlapkit.StepMeter.last: property",
    ):
        assert expected in text
