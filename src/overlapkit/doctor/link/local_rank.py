"""One of the processes that `local` starts. Rank 0 writes what happens, a JSON object a line."""

import json
import os
import sys
from datetime import timedelta
from typing import Any

from overlapkit.doctor.link.group import group
from overlapkit.doctor.link.measure import measure, quorum_of
from overlapkit.doctor.link.measures import Plan, Wire
from overlapkit.doctor.subject import Place


def run(timeout: float) -> None:
    """Measure, as the environment says which rank."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    place = Place.launched(os.environ)
    store = TCPStore(
        "127.0.0.1",
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=timeout),
    )
    with group(place, store, timeout) as device:
        quorum = quorum_of(place.rank, timeout)
        plan = Plan.usual(device == "cuda")
        figures = measure(quorum, Wire(device, timeout), plan, lambda *step: _say(place, {"progress": step}))
        _say(place, {"figures": figures})
        quorum.leave()


def _say(place: Place, what: dict[str, Any]) -> None:
    if place.rank == 0:
        print(json.dumps(what), flush=True)


if __name__ == "__main__":
    try:
        run(float(sys.argv[1]))
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
        os._exit(1)  # a device that hangs would hold up an ordinary exit
