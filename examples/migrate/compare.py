"""What each step of the migration gained, here: all versions run in turns, and their reports are compared.

    python examples/migrate/compare.py                              # CPU or one GPU
    python examples/migrate/compare.py --ranks 2                    # each version under torchrun

Times differ from run to run, so every version runs --rounds times, every other round backwards, and a gain is
one that the reports of all rounds agree on. Where nothing is gained, it says so.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from rich import box
from rich.console import Console
from rich.table import Table

import overlapkit as ok

HERE = Path(__file__).parent
VERSIONS = sorted(path.stem for path in HERE.glob("step_*.py"))
LANES = {  # the parts of the report that a step of the migration is about
    "step_2_loader": ("input", "transfer", "other"),
    "step_3_kernels": ("forward", "backward"),
    "step_4_parallel": ("communication", "backward"),
    "step_5_optimizer": ("optimizer", "other"),
    "step_6_checkpointer": ("checkpoint", "other"),
}


def run(version: str, out: Path, steps: int, ranks: int) -> None:
    """One version, in a process of its own and an empty folder.

    Raises:
        SystemExit: It failed; what it printed stands above.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *(torchrun if ranks > 1 else []), str(HERE / f"{version}.py")]
    done = subprocess.run(
        [*command, "--steps", str(steps), "--out", str(out)], capture_output=True, text=True, env=os.environ
    )
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}\n{version} failed with exit status {done.returncode}")


def own_clock(folders: list[Path]) -> float:
    """Milliseconds a step by the script's own clock: the median of its runs."""
    return median(json.loads((folder / "result.json").read_text())["ms"] for folder in folders)


def changes(before: list[Path], after: list[Path], lanes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """What the reports say of the step, and of the parts of it that matter here.

    Args:
        before: Folders of the runs of the version before, a round each.
        after: Those of this version.
        lanes: The parts.

    Returns:
        Rows of words: the part, its milliseconds before and after, and what the rounds agree on.
    """
    reports = [
        ok.StepReport.compare(one / "report.json", two / "report.json")
        for one, two in zip(before, after, strict=True)
    ]
    rows = []
    for name in ("step", *lanes):
        rounds = [{"step": each.step, **{part.name: part for part in each.parts}}[name] for each in reports]
        was, now = ([getattr(change, side) for change in rounds] for side in ("before", "after"))
        new = None in was and None not in now
        words = "measured from here on" if new else agreed([change.verdict for change in rounds])
        rows.append((name, in_ms(was), in_ms(now), words))
    return rows


def in_ms(values: list[float | None]) -> str:
    """The median, or a dash where it was not measured."""
    return "-" if None in values else f"{median(values):.2f}"


def agreed(verdicts: list[str]) -> str:
    """What all rounds say alike: one that is faster here and slower there was luck."""
    if len(set(verdicts)) > 1:
        return "nothing sure: " + ", ".join(verdicts)
    return {"same": "the same within noise", "unknown": "too few steps to tell"}.get(verdicts[0], verdicts[0])


def arguments() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description="Measure what each step of the migration gains.")
    parser.add_argument("--steps", type=int, default=30, help="training steps a run (30)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each version (2)")
    parser.add_argument("--ranks", type=int, default=1, help="under torchrun, on this machine (1: without)")
    parser.add_argument("--out", type=Path, help="keep reports there; by default nothing is kept")
    args = parser.parse_args()
    for name, least in (("steps", 5), ("rounds", 1), ("ranks", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name} {getattr(args, name)}: give at least {least}")
    if args.out and args.out.exists() and any(args.out.iterdir()):
        parser.error(f"--out {args.out}: it is not empty, and runs would go on where those in it ended")
    return args


def main() -> None:
    """Run all versions in turns, then print the comparison."""
    args = arguments()
    with tempfile.TemporaryDirectory(prefix="migrate-") as temporary:
        out = args.out or Path(temporary)
        for number in range(args.rounds):
            for version in VERSIONS[:: -1 if number % 2 else 1]:
                print(f"round {number + 1} of {args.rounds}: {version}", file=sys.stderr, flush=True)
                run(version, out / version / str(number), args.steps, args.ranks)
        folders = {version: [out / version / str(n) for n in range(args.rounds)] for version in VERSIONS}
        show(folders)


def show(folders: dict[str, list[Path]]) -> None:
    """The table, and the whole way from the plain script to the last one."""
    table = Table("", "", "before", "after", "what the reports say", box=box.SIMPLE_HEAD)
    _, measured, *swaps = VERSIONS
    for before, version in zip([measured, *swaps], swaps, strict=False):
        for number, row in enumerate(changes(folders[before], folders[version], LANES[version])):
            table.add_row("" if number else version, *row)
        table.add_section()
    for row in changes(folders[measured], folders[swaps[-1]], ()):
        table.add_row("all of them", *row)
    first = json.loads((folders[measured][-1] / "report.json").read_text())
    print(f"{measured} says: {first['verdict']}")
    Console(width=max(100, Console().width)).print(table)
    plain, *_, last = (own_clock(runs) for runs in folders.values())
    print(f"by the scripts' own clocks: {plain:.1f} ms a step in {VERSIONS[0]}, {last:.1f} in {VERSIONS[-1]}")


if __name__ == "__main__":
    main()
