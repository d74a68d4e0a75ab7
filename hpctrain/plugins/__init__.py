"""Which plugins there are: slots, discovery, conflicts."""
