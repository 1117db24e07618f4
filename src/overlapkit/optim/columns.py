"""What the int64 columns of the kernel's table mean, and the bits of a tensor's kind: read on both sides."""

# One row a tensor. What is a pointer is 0 where there is none.
PARAM, EXP_AVG, EXP_AVG_SQ, MAX_SQ, LOW, STEP = range(6)
SCALE, SCALE_SQ = 6, 7  # of int8 moments
NUMEL, FIRST_BLOCK, KIND, GROUP, MESH = 8, 9, 10, 11, 12
KEY = 13  # of its random bits
BASE, INNER, OUTER = 14, 15, 16  # global index = BASE + local // INNER * OUTER + local % INNER
COLS, BLOCKS_A_ROW = 17, 18  # of int8 moments
ROW = 20

# The live table: a gradient's pointer for each tensor, then this for each group. Numbers are float64.
LR, BETA1, BETA2, EPS, WEIGHT_DECAY, SIGN = range(6)
LR_AT, BETA1_AT, BETA2_AT = 6, 7, 8  # pointers to fp32, or 0 where the number above counts
GROUP_ROW = 10

# The head of the live table.
N_TENSORS, N_BLOCKS, N_SUMS, MAX_NORM = range(4)
HEAD = 4

# A kind, bit by bit: what the code of a tensor is compiled for. fp32 is none of these bits.
HALF_PARAM = 1  # bf16
PLAIN, ROUNDED, KAHAN, MASTER = 0, 2, 4, 8
GRAD_BF16, GRAD_FP16 = 16, 32
FP32, BF16, INT8 = 0, 64, 128  # the moments
AMSGRAD = 256
ALIGNED = 512  # every address is a multiple of 16 bytes
SPLIT = 1024  # the global index is not BASE + the local one
WHOLE_ROWS = 2048  # int8: no row ends within a block

LANES = 128
"""Elements that share a scale, where moments are int8: a row of a tile."""
TILE = 8 * LANES
"""Elements that a program works on at a time."""
