"""Which samples a rank trains on, and loading them ahead of the step."""
