"""The algorithms of the collectives: over the network, through a node's memory, and in two levels.

Each of the three implements `protocol.Collectives`; `choice.choose` picks one for a group.
"""
