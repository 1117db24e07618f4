"""Does a job lose, repeat or change anything, or hang, whatever happens to it?

    sudo python benchmarks/chaos.py [--minutes 30] [--seed 0] [--ranks 2 4] [--json PATH] [--figure PATH.png]

A small GPT trains on real text through all lanes (chaos_rank.py), on two and four ranks, started by torchrun,
or forked from here so that starts cost little, with or without a network of their own (netlab.py). Meanwhile
things go wrong (chaos_plan.py), at steps and after delays drawn by the seed; several runs follow each other,
each from its first step to its last. Then each run is judged by its own log (chaos_judge.py): every loss, bit
by bit, against an undisturbed run's, every sample of every epoch, every checkpoint, every end. A file system
and a network of one's own need root; what cannot be injected is reported as not measured.

A wrong is printed with the seed and the faults, and the folder with all logs stays. --keep keeps it always.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from argparse import ArgumentTypeError, Namespace
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import numpy as np

import chaos_place
import netlab
from chaos_inject import FREE_MBIT
from chaos_job import adopt_orphans
from chaos_judge import Losses, Shape
from chaos_picture import draw
from chaos_place import Place
from chaos_plan import KINDS, LAUNCHERS, NEED_LAB, NEED_MOUNT, Setting, faults, settings
from chaos_rank import Spec
from chaos_run import Outcome, Run
from harness import Figure, finish, new_file, parser, write_json

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from text import standard_library

from overlapkit import write_token_shards

WINDOW, BATCH, SHARDS = 32, 8, 4
EVERY, KEEP = 5, 3
"""Steps between saves, and checkpoints that stay."""
QUICK_PACE_S = 0.04
"""A quick run has few steps: however fast the machine, they must last until every fault has come."""


def main() -> int:
    options = parser("Does a job lose, repeat or change anything, or hang, whatever happens to it?")
    options.add_argument("--minutes", type=float, default=30.0, help="how long faults are injected (30)")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--ranks", type=_ranks, nargs="+", default=[2, 4], help="numbers of ranks (2 4)")
    options.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=list(LAUNCHERS))
    options.add_argument("--figure", type=new_file, metavar="PATH", help="draw the losses here, as PNG")
    options.add_argument("--keep", action="store_true", help="leave the logs where they are")
    args = options.parse_args()
    if args.device not in (None, "cpu"):
        options.error(f"--device {args.device}: this benchmark runs on the CPU")
    chaos_place.sweep(Path(tempfile.gettempdir()))
    root = Path(tempfile.mkdtemp(prefix=f"{chaos_place.PREFIX}{os.getpid()}-"))
    adopt_orphans()
    outcomes: list[Outcome] = []
    try:
        lacks = campaign(args, root, outcomes)
    finally:
        if args.keep or sys.exc_info()[0] or any(outcome.verdict.wrong for outcome in outcomes):
            chaos_place.keep(root)
            print(f"the logs are in {root}", file=sys.stderr)
        else:
            shutil.rmtree(root)
    if args.figure:
        draw(args.figure, outcomes)
    code = finish(figures(outcomes, lacks), args)
    if args.json:
        told = {outcome.title(): outcome.story() for outcome in outcomes}
        write_json(args.json, json.loads(args.json.read_text()) | {"runs": told})
    return code


def _ranks(text: str) -> int:
    if not (text.isdecimal() and int(text) and BATCH % int(text) == 0):
        raise ArgumentTypeError(f"{text!r}: give a number of ranks that divides the batch of {BATCH}")
    return int(text)


def campaign(args: Namespace, root: Path, outcomes: list[Outcome]) -> dict[str, str]:
    """All runs, added to `outcomes`; returns which kinds cannot be injected here, with the reason."""
    lacks: dict[str, str] = {}
    for kinds, why in ((NEED_MOUNT, chaos_place.missing()), (NEED_LAB, netlab.missing())):
        lacks |= dict.fromkeys(sorted(kinds), why) if why else {}
    lacks |= {} if len(args.ranks) > 1 else {"resize": "it needs two numbers in --ranks"}
    if "throttle" not in lacks and "lab" not in args.launchers:
        lacks["throttle"] = "it needs the launcher lab"
    launchers = [one for one in args.launchers if one != "lab" or "throttle" not in lacks]
    with ExitStack() as stack:
        lab = None
        if "lab" in launchers:
            lab = stack.enter_context(netlab.Lab(max(args.ranks), FREE_MBIT))
        field_ = Field(
            args, root, lab, own_disk="full" not in lacks, kinds=[k for k in KINDS if k not in lacks]
        )
        for setting in field_.settings(launchers):
            outcomes.append(field_.run(setting))
            tell(outcomes[-1], args.seed)
    return lacks


@dataclass
class Field:
    """Where all runs take place, and what they are compared with."""

    args: Namespace
    root: Path
    lab: netlab.Lab | None
    own_disk: bool
    kinds: list[str]
    references: dict[tuple[str, int], Losses] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.steps = 160 if self.args.quick else 400
        samples = BATCH * (20 if self.args.quick else 40)
        self.shape = Shape(self.steps, samples // BATCH, write_data(self.root / "data", samples), KEEP)
        self.until = float("inf") if self.args.quick else time.monotonic() + 60 * self.args.minutes

    def settings(self, launchers: list[str]) -> Iterator[Setting]:
        """The runs, until time is up."""
        for setting in settings(self.args.seed, self.args.ranks, launchers, self.args.quick):
            if time.monotonic() >= self.until:
                return
            yield setting

    def run(self, setting: Setting) -> Outcome:
        """One of them, against the undisturbed ones."""
        references = {world: self.reference(setting.wrap, world) for world in setting.worlds}
        planned = faults(self.args.seed, setting, self.kinds, self.args.quick)
        place = Place(self.root / f"run-{setting.number}", self.root / "data", self.own_disk)
        place.set_pace(QUICK_PACE_S if self.args.quick else 0)
        try:
            lab = self.lab if setting.launcher == "lab" else None
            return Run(setting, planned, place, self.spec(place, setting), self.shape, lab, self.until).go(
                references
            )
        finally:
            place.close()

    def reference(self, wrap: str, world: int) -> Losses:
        """The losses of a run that nothing disturbs."""
        began = time.monotonic()
        if (wrap, world) not in self.references:
            setting = Setting(-1, "fork", wrap, (world,), stop=True)
            place = Place(self.root / f"undisturbed-{wrap}-{world}", self.root / "data", self.own_disk)
            try:
                run = Run(setting, iter(()), place, self.spec(place, setting), self.shape)
                self.references[wrap, world] = run.undisturbed()
            finally:
                place.close()
            self.until += time.monotonic() - began  # the minutes are those of the faults
        return self.references[wrap, world]

    def spec(self, place: Place, setting: Setting) -> Spec:
        """What ranks are told."""
        return Spec(
            store=str(place.run),
            data=str(place.data),
            logs=str(place.logs),
            control=str(place.control),
            life=0,
            steps=self.steps,
            window=WINDOW,
            batch=BATCH,
            wrap=setting.wrap,
            every=EVERY,
            keep=KEEP,
            stop=setting.stop,
            deadline=20.0,
            patience=40.0 if setting.launcher == "torchrun" else 20.0,  # for interpreters that start
            hang=15.0,
        )


def write_data(folder: Path, count: int) -> frozenset[str]:
    """Token shards of so many samples of real text, no two alike; returns what tells them apart."""
    text, _ = standard_library()
    per_shard = count // SHARDS
    seen: set[str] = set()
    documents = []
    windows = iter(
        np.lib.stride_tricks.sliding_window_view(text.numpy(), per_shard * WINDOW + 1)[:: 64 * WINDOW]
    )
    while len(documents) < SHARDS:
        document = next(windows)
        rows = (document[at * WINDOW : (at + 1) * WINDOW + 1] for at in range(per_shard))
        names = {blake2b(row.tobytes(), digest_size=6).hexdigest() for row in rows}
        if len(names) == per_shard and not names & seen:
            seen |= names
            documents.append(document.astype(np.uint16))
    write_token_shards(documents, folder, shard_tokens=per_shard * WINDOW + 1, progress=False)
    return frozenset(seen)


def tell(outcome: Outcome, seed: int) -> None:
    """A line for a run, and all about one in which something was wrong."""
    verdict = outcome.verdict
    counts = f"{len(outcome.events)} faults, {len(outcome.lives)} starts, {outcome.seconds:.0f} s"
    print(f"{outcome.title()}: {counts}, {len(verdict.wrong)} wrong", file=sys.stderr)
    if verdict.wrong:
        print(f"seed {seed}:", *verdict.wrong, "faults:", *outcome.story(), sep="\n  ", file=sys.stderr)


def figures(outcomes: list[Outcome], lacks: dict[str, str]) -> list[Figure]:
    """The report."""
    events = [event for outcome in outcomes for event in outcome.events]
    verdicts = [outcome.verdict for outcome in outcomes]
    by_kind = defaultdict(list)
    for event in events:
        by_kind[event.kind].append(event)
    rows = []
    for kind, words in KINDS.items():
        name = f"{words}" + (f" (not here: {lacks[kind]})" if kind in lacks else "")
        survived = [event.took for event in by_kind[kind] if event.took is not None]
        count = None if kind in lacks else len(survived)
        rows.append(
            Figure(f"survived: {name}", count, "faults", peer="injected", peer_value=len(by_kind[kind]))
        )
        if survived:
            low, median, high = np.percentile(survived, [25, 50, 75])
            rows.append(Figure(f"to recover: {words}", float(median), "s", spread=(float(low), float(high))))
    memory, descriptors = (max((o.growth(what) for o in outcomes), default=0) for what in ("rss", "fds"))
    recovered = sum(event.recovered is not None for event in events)
    wrong = sum(len(verdict.wrong) for verdict in verdicts)
    rows += [
        Figure("faults injected", len(events), "faults"),
        Figure("faults survived", recovered, "faults", "higher", "injected", len(events), ratio_limit=1.0),
        Figure("wrong", wrong, "", better="lower", limit=0.0),
        Figure("samples lost", sum(one.lost for one in verdicts), "samples", better="lower", limit=0.0),
        Figure("samples doubled", sum(one.doubled for one in verdicts), "samples", better="lower", limit=0.0),
        Figure("steps taken again", sum(one.repeated for one in verdicts), "steps"),
        Figure(
            "largest difference of a loss at other ranks",
            max((one.apart for one in verdicts), default=0.0),
            "",
        ),
        Figure("most that a rank's memory grew in a life", memory / 1024, "MiB"),
        Figure("most that a rank's descriptors grew in a life", descriptors, "descriptors"),
        Figure("runs", len(outcomes), "runs"),
        Figure("starts of all ranks", sum(len(outcome.lives) for outcome in outcomes), "starts"),
    ]
    return rows


if __name__ == "__main__":
    sys.exit(main())
