"""The table's columns and the bits of kinds as Triton takes them: those of `overlapkit.optim.columns`."""

import triton.language as tl

from overlapkit.optim import columns

LANES, TILE = tl.constexpr(columns.LANES), tl.constexpr(columns.TILE)
ROW, GROUP_ROW, HEAD = (tl.constexpr(n) for n in (columns.ROW, columns.GROUP_ROW, columns.HEAD))
PARAM, EXP_AVG, EXP_AVG_SQ, MAX_SQ, LOW, STEP, SCALE, SCALE_SQ = (tl.constexpr(n) for n in range(8))
NUMEL, FIRST_BLOCK, KIND_AT, GROUP_AT, MESH_AT, KEY = (tl.constexpr(n) for n in range(8, 14))
BASE, INNER, OUTER, COLS, BLOCKS_A_ROW = (tl.constexpr(n) for n in range(14, 19))
LR, BETA1, BETA2, EPS, WEIGHT_DECAY, SIGN, LR_AT, BETA1_AT, BETA2_AT = (tl.constexpr(n) for n in range(9))
N_TENSORS, N_BLOCKS, N_SUMS, MAX_NORM = (tl.constexpr(n) for n in range(4))
HALF_PARAM, ROUNDED, KAHAN, MASTER = (tl.constexpr(1 << n) for n in range(4))
GRAD_BF16, GRAD_FP16, BF16, INT8 = (tl.constexpr(1 << n) for n in range(4, 8))
AMSGRAD, ALIGNED, SPLIT, WHOLE_ROWS = (tl.constexpr(1 << n) for n in range(8, 12))
