"""Checks that plugins keep their contracts, made where a run uses what they return. Each costs little, so every run makes it."""
