"""Plans a job: its memory, communication and time on any number of ranks, from one rank without values. `hpctrain plan`."""
