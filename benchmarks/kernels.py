"""How near are the kernels to what the memory allows, and are they ahead of their peers?

    python benchmarks/kernels.py [KERNEL ...] [--quick] [--json PATH] [--device cpu] [--budget SECONDS]

On a GPU: time beside torch, torch.compile, Liger and, where it is installed, quack (pip install
quack-kernels), by replays of CUDA graphs in turns, the L2 cache flushed before each; the share of the copy
bandwidth measured in the same run; and peak memory. Without one: the bytes that our kernels and Liger's load
and store in Triton's interpreter, in fp16, over the floor, each input read once and each result written
once; and the memory that linear_cross_entropy takes. What is not installed is reported as not measured.
"""

import os
import sys

from budget import Budget, add_budget
from harness import finish, parser
from overlapkit.device import as_device


def main() -> int:
    options = parser("How near are the kernels to what the memory allows, and are they ahead of their peers?")
    options.add_argument("kernels", nargs="*", metavar="KERNEL", help="(default: all)")
    add_budget(options)
    args = options.parse_args()
    budget = Budget(args.budget)
    device = as_device(args.device)
    if device.type == "cpu":
        if args.budget is not None:
            options.error(
                "--budget: bytes are counted all at once; leave it out without a GPU, or use --quick"
            )
        os.environ["TRITON_INTERPRET"] = "1"  # before the first import of Triton
    from kernel_cases import CASES
    from kernel_memory import HEAD, head_figures

    known = [*CASES, HEAD]
    for name in args.kernels:
        if name not in known:
            options.error(f"KERNEL={name!r}: choose from {', '.join(known)}")
    wanted = args.kernels or known
    if device.type == "cpu":
        from kernel_bytes import measure

        figures = measure([name for name in wanted if name in CASES], args.quick)
        if HEAD in wanted:
            figures += head_figures(args.quick, device)
    else:
        from kernel_speed import measure as measure_speed

        figures = measure_speed(wanted, args.quick, device, budget)
    return finish(figures, args)


if __name__ == "__main__":
    sys.exit(main())
