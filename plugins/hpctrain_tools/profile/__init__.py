"""Profilers of trainings, and what is made of their traces."""
