"""Plugins for hpctrain. They import hpctrain.api and nothing else of it."""
