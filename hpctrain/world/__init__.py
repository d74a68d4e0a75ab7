"""A process's identity among the ranks, and how the ranks meet and end."""
