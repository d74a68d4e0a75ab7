"""Activation checkpointing plugins."""
