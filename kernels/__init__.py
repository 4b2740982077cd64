"""Triton kernels, one file per op."""
