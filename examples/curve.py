"""The loss curve of a run."""

from pathlib import Path
from typing import Any


def draw_losses(result: dict[str, Any], path: Path) -> None:
    """Training loss over steps, against what the tables of single bytes and of pairs leave."""
    from matplotlib.figure import Figure  # optional: without the extra `viz` there are no pictures

    axes = Figure(figsize=(8, 4.5), layout="constrained").add_subplot()
    losses = result["losses"]
    axes.plot(range(1, len(losses) + 1), losses, color="tab:blue", label="training")
    for name, colour in (("unigram", "tab:gray"), ("bigram", "tab:orange")):
        axes.axhline(result[name], color=colour, linestyle="--", label=f"{name} {result[name]:.2f}")
    if "validation" in result:
        label = f"validation {result['validation']:.2f}"
        axes.plot([len(losses)], [result["validation"]], "o", color="tab:red", label=label)
    axes.set(
        xlabel="step", ylabel="loss, nats a byte", ylim=(0, None), title="GPT on Python's standard library"
    )
    axes.grid(alpha=0.3)
    axes.legend()
    axes.figure.savefig(path, dpi=120)
