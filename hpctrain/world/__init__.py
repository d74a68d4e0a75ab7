"""Who am I among the ranks, and how ranks are started and meet."""
