"""What is a mutation point and what is not: by the name of the call, but for receivers that are named here.

Everything that is called like a wait counts, whoever it belongs to. What is left out is named here, each with
its reason, so that a wait of a new kind is a point until somebody says why not.
"""

from typing import NamedTuple

WAITS = ("wait", "wait_event", "wait_for", "wait_stream", "order", "settle", "fence", "synchronize", "result")
"""They make the host or a stream wait."""

LOOKS = ("done", "query")
"""They ask whether something is over; taken out, the answer is yes."""

RECORDS = ("record", "record_event", "record_stream")
"""They note where a stream is, or that it uses a memory."""

GUARDS = ("give_back",)
"""The ring of host buffers hands a buffer out again only behind the ticket that it was given back with."""

OURS = (
    "_also_used_here",
    "_also_used_on",
    "_await",
    "_order",
    "before_step",
    "make_room",
    "seal",
    "wait_for_earlier",
    "wait_late",
)
"""Our own functions that do one of the above for whoever calls them."""

METHODS = frozenset(WAITS + LOOKS + RECORDS + GUARDS + OURS)


class Other(NamedTuple):
    """Something that is called like a wait and orders no work of a device or a lane.

    Attributes:
        file: The path within the package, or the beginning of it; "" for all.
        receiver: The last name of what it is called on.
        reason: What it is.
    """

    file: str
    receiver: str
    reason: str


OTHERS = (
    Other("checkpoint/dcp/saving.py", "store", "the job's store: ranks meet, no tensor is touched"),
    Other("checkpoint/preemption.py", "_known", "threading.Event: tells a thread to begin"),
    Other("checkpoint/preemption.py", "_over", "threading.Event: tells a thread to end"),
    Other("checkpoint/preemption.py", "_wakeup", "signals"),
    Other("doctor/link/local.py", "process", "a child process"),
    Other("doctor/link/local.py", "running", "a child process"),
    Other("input/iterator.py", "ranks", "ranks agree through the job's store"),
    Other("input/sources.py", "wait", "multiprocessing: looks whether worker processes have ended"),
    Other("measure/across/liaison.py", "news", "threading.Condition: ranks compare, beside the training"),
    Other("measure/across/liaison.py", "wake", "threading.Event: paces a thread"),
    Other("measure/across/watch.py", "stop", "threading.Event: paces and ends a thread"),
    Other("measure/ledger.py", "self", "Ledger.settle: sets steps aside, waits for nobody"),
    Other("measure/meter.py", "_ledger", "Ledger.settle: sets steps aside, waits for nobody"),
    Other("plan/played_report.py", "ledger", "Ledger.settle: sets steps aside, waits for nobody"),
    Other("quorum.py", "self", "ranks agree through the job's store"),
    Other("", "quorum", "ranks agree through the job's store"),
    Other("", "_quorum", "ranks agree through the job's store"),
)


def other(file: str, receiver: str) -> Other | None:
    """Why a call on `receiver` in `file` is no point; None where it is one."""
    for one in OTHERS:
        if receiver == one.receiver and file.startswith(one.file):
            return one
    return None
