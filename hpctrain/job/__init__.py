"""The job file: read with positions, checked all at once, kept as a typed Job."""
