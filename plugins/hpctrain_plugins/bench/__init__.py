"""Measurements of a job: its step, its scaling, and other trainers of the same model."""
