"""Sharding plugins: one per ZeRO stage."""
