"""The optimizer's Triton kernels. These modules import Triton."""
