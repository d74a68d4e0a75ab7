"""The algorithms of the collectives: over the network, through a node's memory, and in two levels."""
