"""What does each kernel need of a processor: registers, spills, shared memory, on GPUs that are not here?

Compiles kernels for sm_80, sm_90, sm_100 and gfx942 as launch code would launch them, and reads from their
binaries what they need: those that users run most, into benchmarks/results/ahead.json and docs/resources.md;
with --all every configuration that launch code can choose, hours on one core, and says only what is wrong:

    python benchmarks/compile_ahead.py [--all] [--architectures sm_90 gfx942] [--share 0.1] [--jobs 2]

The exit status is 3 where one does not compile, or what the rule chooses spills or asks for too much.
"""

import argparse
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import triton

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from harness import MET, MISSED, write_json  # noqa: E402
from overlapkit.optim import columns  # noqa: E402
from tests.kernels import configurations as kernels  # noqa: E402
from tests.kernels.ahead import SHARED_AT_MOST, Launch, needed  # noqa: E402
from tests.optim import configurations as optim  # noqa: E402

RESULTS, PAGE = ROOT / "benchmarks/results/ahead.json", ROOT / "docs/resources.md"
ARCHITECTURES = {a if isinstance(a, str) else f"sm_{a}": a for a in SHARED_AT_MOST}
Row = dict[str, Any]


def main() -> int:
    args = arguments()
    launches = everything() if args.all else of_users()
    jobs = [(i, name) for i in range(len(launches)) for name in args.architectures]
    random.Random(args.seed).shuffle(jobs)  # a share of them is of all kinds
    jobs = jobs[: max(1, round(args.share * len(jobs)))]
    found: list[Row] = [row_of(launch) for launch in launches]
    wrong: list[str] = []
    begun = time.monotonic()
    for done, (i, name, needs) in enumerate(compiled(launches, jobs, args.jobs), 1):
        found[i][name] = needs
        if reason := fault(launches[i], name, needs):
            wrong.append(f"{reason}: {name} {json.dumps(launches[i].configuration)}")
            print(wrong[-1], flush=True)
        if done % 100 == 0:
            print(f"{done} of {len(jobs)} in {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    say(launches, found, args.architectures, wrong)
    if not args.all and args.share == 1.0 and set(args.architectures) == set(ARCHITECTURES):
        content = {"triton": triton.__version__, "rows": found}
        write_json(RESULTS, content)
        PAGE.write_text(page(content))
    return MISSED if wrong else MET


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="every configuration; writes no files")
    parser.add_argument("--architectures", nargs="+", choices=[*ARCHITECTURES], default=[*ARCHITECTURES])
    parser.add_argument("--share", type=float, default=1.0, help="of the compilations, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of that draw")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    return parser.parse_args()


def of_users() -> list[Launch]:
    """The sizes, dtypes and forms that users run most."""
    return [*kernels.of_users(), *optim.of_users()]


def everything() -> list[Launch]:
    """All that launch code can choose."""
    return [*kernels.configurations(), *optim.configurations()]


def row_of(launch: Launch) -> Row:
    """A configuration as the results file has it: what JSON gives back."""
    row: Row = json.loads(json.dumps(launch.configuration))
    return row


def compiled(
    launches: list[Launch], jobs: list[tuple[int, str]], processes: int
) -> Iterator[tuple[int, str, list[int] | str]]:
    """For each job its launch, the architecture, and what it needs there or why it does not compile."""
    _launches.extend(launches)  # forked processes have them
    cache = tempfile.mkdtemp(prefix="ahead-")
    os.environ["TRITON_CACHE_DIR"] = cache
    try:
        if processes == 1:
            yield from map(_compile, jobs)
            return
        with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
            for at in range(0, len(jobs), 1000):
                yield from pool.map(_compile, jobs[at : at + 1000], chunksize=4)
                shutil.rmtree(cache, ignore_errors=True)  # some 100 KB each
    finally:
        shutil.rmtree(cache, ignore_errors=True)


_launches: list[Launch] = []


def _compile(job: tuple[int, str]) -> tuple[int, str, list[int] | str]:
    index, name = job
    try:
        return index, name, list(needed(_launches[index].compile_anew(ARCHITECTURES[name])))
    except Exception as error:
        return index, name, f"{type(error).__name__}: {str(error).strip().splitlines()[-1:]}"


def fault(launch: Launch, architecture: str, needs: list[int] | str) -> str | None:
    """What is wrong with it. A candidate may spill or ask for too much: autotune measures it, or drops it."""
    if isinstance(needs, str):
        return f"does not compile ({needs})"
    _, spills, shared = needs
    if launch.by_rule and spills:
        return f"spills {spills}"
    if launch.by_rule and shared > SHARED_AT_MOST[ARCHITECTURES[architecture]]:
        return f"needs {shared} bytes of shared memory"
    return None


def say(launches: list[Launch], found: list[Row], architectures: list[str], wrong: list[str]) -> None:
    """Count by kernel."""
    for name in architectures:
        done = [(launch, row[name]) for launch, row in zip(launches, found, strict=True) if name in row]
        count = Counter(launch.name for launch, _ in done)
        spilling = Counter(x.name for x, needs in done if isinstance(needs, list) and needs[1])
        print(f"{name}: {len(done)} of {len(launches)} configurations compiled")
        for kernel in sorted(count):
            print(f"  {kernel}: {count[kernel]}, of which {spilling[kernel]} spill")
    print(f"wrong: {len(wrong)}")


def page(content: dict[str, Any]) -> str:
    """docs/resources.md."""
    rows: list[Row] = content["rows"]
    lines = [
        "# What each kernel needs of a processor",
        "",
        f"Compiled ahead of time by Triton {content['triton']}, for GPUs that were not there: registers",
        "a thread / bytes a thread of what did not fit into them / bytes of shared memory a program.",
        "`make resources` writes this page. The configurations are those that launch code chooses by rule at",
        "the sizes that users run most, with all options off and with all on;",
        "[testing](testing.md#every-configuration-is-compiled) says what else is compiled.",
        "",
        f"Of {len(rows)} configurations {sum(any(row[a][1] for a in ARCHITECTURES) for row in rows)} spill.",
    ]
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        head = ["dtypes", "block", "warps", "options", *ARCHITECTURES]
        lines += ["", f"## {kernel}", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        for row in (row for row in rows if row["kernel"] == kernel):
            needs = [" / ".join(f"{n:,}" for n in row[a]) for a in ARCHITECTURES]
            lines.append("| " + " | ".join([*described(row), *needs]) + " |")
    return "\n".join(lines) + "\n"


def described(row: Row) -> list[str]:
    """A configuration in words: dtypes, block, warps and the options that are on."""
    types = {name.removesuffix("_ptr"): kind for name, kind in row.items() if name.endswith("_ptr")}
    if "KINDS" in row:
        bits = {name: bit for name, bit in vars(columns).items() if name in BITS}
        kinds = [
            " ".join(n.lower() for n, bit in bits.items() if kind & bit) or "fp32" for kind in row["KINDS"]
        ]
        return [", ".join(kinds), "8 x 128", str(row["warps"]), options(row)]
    first, *others = types.items()
    shown = [first[1], *(f"{name} {kind}" for name, kind in others if name == "weight" and kind != first[1])]
    block = " x ".join(str(n) for name, n in row.items() if name.startswith("BLOCK_"))
    return [", ".join(shown), block, str(row["warps"]), options(row)]


BITS = ["HALF_PARAM", "ROUNDED", "KAHAN", "MASTER", "GRAD_BF16", "GRAD_FP16", "BF16", "INT8", "AMSGRAD"]
BITS += ["SPLIT", "WHOLE_ROWS"]


def options(row: Row) -> str:
    """The flags that are on."""
    flags = [name for name, value in row.items() if name.isupper() and value is True]
    words = [value for name, value in row.items() if name.isupper() and isinstance(value, str)]
    on = [name.removeprefix("HAS_").removeprefix("NEED_").lower() for name in flags]
    return ", ".join([*on, *words]) or "none"


if __name__ == "__main__":
    sys.exit(main())
