"""The algorithms: collectives made of transfers, over the network, through a node's memory, and in two levels.

`protocol.Collectives` is what each of the three gives; `choice.choose` says which one a group gets.
"""
