"""hpctrain as a library: its parts in the loop of a program."""
