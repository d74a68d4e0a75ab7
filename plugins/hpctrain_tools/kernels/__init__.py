"""Kernels that the compiler has made for a run, kept for its next start."""
