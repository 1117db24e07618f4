"""Published runs of Llama 3.1 8B under FSDP, and the profile and fabric that simulations start from.

torchtitan's own report of December 2024 (its repository, benchmarks/llama3_h100_202412_torchtitan.md):
H100 at 500 W with 2.4 TB/s of memory, eight a host on NVLink, 400 Gb/s of RDMA network a GPU; sequences of
8,192 tokens, two a GPU; bf16 parameters, fp32 reduction, AdamW, selective activation checkpointing.
"""

from dataclasses import dataclass

from overlapkit.plan import Fabric, Profile, UnitProfile, Wire

TOKENS = 2 * 8192
WIDTH, LAYERS, VOCABULARY, HIDDEN, KV = 4096, 32, 128256, 14336, 1024
BLOCK = 2 * WIDTH * WIDTH + 2 * WIDTH * KV + 3 * WIDTH * HIDDEN + 2 * WIDTH
TABLE = VOCABULARY * WIDTH
PARAMETERS = LAYERS * BLOCK + 2 * TABLE + WIDTH

OPTIMIZER_S = PARAMETERS * 28 / 2.4e12
"""AdamW reads a gradient, a weight and two moments, and writes three of them, at the memory's rate."""

BACKWARD = 2.35
"""Backward over forward: twice the arithmetic, and a share of forward again (selective checkpointing)."""

H100 = Fabric(
    Wire(370e9, 2e-6),
    Wire(45e9, 6e-6),
    source="given: 370 GB/s of ring in a host (NVLink: 450 GB/s), 45 GB/s a GPU between hosts (400 Gb/s)",
)
A100 = Fabric(
    Wire(230e9, 2e-6),
    Wire(22e9, 6e-6),
    source="given: 230 GB/s of ring in a host (NVLink: 300 GB/s), 22 GB/s a GPU between hosts (200 Gb/s)",
)


H100_S = 2.726
"""Forward and backward of two sequences on that H100 alone: what 8 of them took, less the rest."""

A100_S = 16384 / 2904 / 0.97
"""On an A100, from torchtitan's 2,904 tokens a second on each of 64, one sequence at a time."""


@dataclass(frozen=True)
class Pair:
    """Tokens a second and GPU of the same run on 8 and on 128 GPUs."""

    name: str
    eight: float
    many: float

    @property
    def loss(self) -> float:
        """Share of the throughput that 128 GPUs lose."""
        return 1 - self.many / self.eight


EAGER = Pair("FSDP", 5762, 5605)
COMPILED = Pair("FSDP + torch.compile", 6667, 6514)
FLOAT8 = Pair("FSDP + torch.compile + Float8", 8532, 8380)


def llama(compute_s: float) -> Profile:
    """The model whose forward and backward take so long on one GPU, shared out by matrix arithmetic."""
    forward = compute_s / (1 + BACKWARD)
    attention = 8192 * WIDTH  # multiply-adds a token of a block's two attention products, causal
    whole = LAYERS * (BLOCK + attention) + TABLE
    times = {
        name: (forward * work / whole, BACKWARD * forward * work / whole)
        for name, work in (("block", BLOCK + attention), ("head", TABLE))
    }
    blocks = [
        _unit((f"layers.{i}",), BLOCK, *times["block"], saved=34 * 2 * TOKENS * WIDTH // 2, block=True)
        for i in range(LAYERS)
    ]
    embedding = _unit(("tok_embeddings",), TABLE, 0.0, 0.0, needs=False)
    head = _unit(("norm", "output"), TABLE + WIDTH, *times["head"], saved=4 * TOKENS * VOCABULARY)
    root = _unit((), 0, 0.0, 0.0)
    return Profile((embedding, *blocks, head, root), TOKENS, device="cuda", source="from the published run")


def _unit(
    modules: tuple[str, ...],
    elements: int,
    forward_s: float,
    backward_s: float,
    *,
    saved: int = 0,
    block: bool = False,
    needs: bool = True,
) -> UnitProfile:
    gradients = (elements,) if elements else ()
    inputs = 2 * TOKENS * WIDTH
    return UnitProfile(
        modules, block, elements, gradients, 4 * elements, forward_s, backward_s, saved, inputs, needs
    )
