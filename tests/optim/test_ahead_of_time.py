"""The optimizer's kernels compiled for GPUs that are not here: no spills, and accesses of 128 bits."""

import re
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from overlapkit.optim.columns import ALIGNED
from overlapkit.optim.optimizer import AdamW
from overlapkit.optim.raw import launcher
from overlapkit.optim.table import Entry, Table
from tests.kernels.ahead import Launch, recorded, resources

FORMS: list[tuple[dict[str, Any], torch.dtype]] = [
    ({}, torch.float32),
    ({"precision": "bf16_kahan", "moments": "bf16"}, torch.bfloat16),
    ({"precision": "bf16_sr"}, torch.bfloat16),
    ({"precision": "bf16_sr", "moments": "int8"}, torch.bfloat16),
    ({}, torch.bfloat16),
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))


def launches(options: dict[str, Any], dtype: torch.dtype, offset: int = 0) -> list[Launch]:
    """Clipping, with a scale and a check for infinite gradients; and clipping alone."""
    memory = torch.zeros(64 * 256 + 8, dtype=dtype)
    param = nn.Parameter(memory[offset : offset + 64 * 256].view(64, 256))
    optimizer = AdamW([param], **options)
    grad, form = torch.zeros_like(param), optimizer._form(param, optimizer.param_groups[0])
    table = Table([Entry(param, form, optimizer.state[param], 0, 0)], [grad])
    table.refresh([grad], [grad.data_ptr()], optimizer.param_groups, 1.0)
    one = torch.ones(1)
    with recorded() as found:
        sums = launcher.squares(table)
        launcher.update(table, torch.zeros(1, dtype=torch.int32), one, one, sums, one)
        launcher.multiply(table, sums)
    return found


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(("options", "dtype"), FORMS, ids=str)
def test_compiles_without_spills(options: dict[str, Any], dtype: torch.dtype, capability: int) -> None:
    for launch in launches(options, dtype):
        if launch.kernel.__name__ == "update" or (options, dtype) == FORMS[0]:
            used = resources(launch.compile(capability).asm["cubin"])
            assert (used["STACK"], used["LOCAL"]) == (0, 0), (launch.kernel.fn, used)


@pytest.mark.parametrize(("options", "dtype"), [FORMS[0], FORMS[2], FORMS[4]], ids=str)
def test_full_tiles_are_accessed_by_128_bits(options: dict[str, Any], dtype: torch.dtype) -> None:
    """fp32 takes two accesses a thread and tensor, bf16 one; the remainder's int16 as bf16."""
    update = launches(options, dtype)[1]
    ptx = update.compile(90).asm["ptx"]
    loads, stores = (len(re.findall(rf"{op}\.global\S*\.v4\.b32", ptx)) for op in ("ld", "st"))
    wanted = {"fp32": (8, 6), "bf16_sr": (6, 5), "bf16_master": (7, 6)}
    name = "fp32" if dtype == torch.float32 else options.get("precision", "bf16_master")
    assert (loads, stores) == wanted[name]


def test_what_is_not_aligned_is_not_taken_for_it() -> None:
    """A false hint goes unnoticed in the interpreter, and is an illegal address on a GPU."""
    for offset, aligned in ((0, True), (1, False)):
        update = launches({}, torch.float32, offset)[1]
        assert bool(update.constants["KINDS"][0] & ALIGNED) == aligned
        assert bool(re.search(r"(ld|st)\.global\S*\.v[24]", update.compile(90).asm["ptx"])) == aligned
