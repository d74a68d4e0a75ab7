"""Requests to a running job from another terminal, over files in its directory, and what its ranks do meanwhile.

A plugin's `hpctrain_request` takes them. Imports no torch, for commands.
"""

from hpctrain.ranks.watchdog.queries import Asked, ask, asked, silence

__all__ = ["Asked", "ask", "asked", "silence"]
