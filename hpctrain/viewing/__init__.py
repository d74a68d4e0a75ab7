"""Runs seen from outside, by the files that they write: `hpctrain runs`, `top` and `status`. Nothing here imports torch."""
