"""Summing gradients over the data-parallel ranks, compressed where the job says so."""
