"""The report and the picture of docs/life_of_a_step.md: a real run of the example on two ranks.

    python benchmarks/life_of_a_step.py

It trains for 60 steps (two to three minutes on two cores), and writes what the run has printed into the page
and the lanes of its last steps to docs/images/life_of_a_step.png.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import ROOT, commit, environment, hardware, versions

PAGE = ROOT / "docs/life_of_a_step.md"
PICTURE = ROOT / "docs/images/life_of_a_step.png"
RUN = "torchrun --nproc-per-node 2 examples/train_gpt.py --steps 60 --save-every 19 --eval-batches 0"
BEGIN, END = "<!-- report of benchmarks/life_of_a_step.py -->\n", "<!-- end of report -->\n"
PATIENCE_S = 1200.0


def main() -> None:
    """Run, and put the results into their places."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = [sys.executable, "-m", "torch.distributed.run", *RUN.split()[1:]]
        done = subprocess.run(
            [*launcher, "--out", folder],
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
            timeout=PATIENCE_S,
            check=True,
        )
        shutil.copyfile(Path(folder) / "lanes.png", PICTURE)
    machine, made = hardware(), versions()
    where = f"{machine['cpu']}, {machine['cores']} cores, torch {made['torch']}, commit {str(commit())[:12]}"
    PAGE.write_text(put(PAGE.read_text(), f"$ {RUN}\n{report_in(done.stdout)}", where))


def report_in(printed: str) -> str:
    """The report among what the example prints: from its first line on, to where the files are named."""
    lines = printed.splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("starting; ")) + 1
    last = next(at for at, line in enumerate(lines) if line.startswith("see "))
    return "\n".join(line.rstrip() for line in lines[first:last])


def put(page: str, report: str, where: str) -> str:
    """The page with this report between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, mark, after = rest.partition(END)
    assert mark, f"{PAGE} lacks its marks"
    return f"{before}{BEGIN}\n```text\n{report}\n```\n\n({where}.)\n\n{mark}{after}"


if __name__ == "__main__":
    main()
