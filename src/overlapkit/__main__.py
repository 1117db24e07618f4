"""`python -m overlapkit`: the command line, where the script's folder is not on PATH (torchrun -m, say)."""

from overlapkit.cli import main

if __name__ == "__main__":
    main()
