"""A process's identity among the ranks; how the ranks meet and how they end."""
