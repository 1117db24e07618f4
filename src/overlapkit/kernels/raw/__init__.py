"""The Triton kernels and their launchers, one family a module. These modules import Triton."""
