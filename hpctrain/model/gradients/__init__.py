"""Summing gradients over the data-parallel ranks, compressed between nodes where the job says so."""
