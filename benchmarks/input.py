"""Is the input always ready, and what does it cost?

    python benchmarks/input.py [jpeg|tokens|cold|overlap|overhead ...] [--quick] [--json PATH] [--png PATH]

Five parts: photographs to batches (input_jpeg.py), tokens to batches (input_tokens.py), tokens that are on
disk alone (input_cold.py), reading beside a step (input_overlap.py), and what wrapping costs
(input_overhead.py), each of which says how it measures.
The peers are pip install -e '.[bench]' and, for SPDL, FFmpeg's libraries (apt-get install ffmpeg); a peer
that is missing is reported as not measured. All parts take half an hour on two cores.
"""

import argparse
import sys

import input_cold
import input_jpeg
import input_overhead
import input_overlap
import input_tokens
from bars import draw
from harness import finish, new_file, parser
from overlapkit.device import as_device

PARTS = {
    "jpeg": input_jpeg.measure,
    "tokens": input_tokens.measure,
    "cold": input_cold.measure,
    "overlap": input_overlap.measure,
    "overhead": input_overhead.measure,
}


def main() -> int:
    args = _arguments()
    device = as_device(args.device)
    figures = [figure for part in args.parts or PARTS for figure in PARTS[part](args.quick, device)]
    if args.png is not None:
        draw(args.png, figures, args.question)
    return finish(figures, args)


def _arguments() -> argparse.Namespace:
    options = parser("Is the input always ready, and what does it cost?")
    options.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    options.add_argument("--png", type=new_file, metavar="PATH", help="draw the report here")
    args = options.parse_args()
    for name in args.parts:
        if name not in PARTS:
            options.error(f"PART={name!r}: choose from {', '.join(PARTS)}")
    return args


if __name__ == "__main__":
    sys.exit(main())
