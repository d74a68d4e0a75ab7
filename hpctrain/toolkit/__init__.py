"""Building blocks for plugins: the strategies, formats and commands that come with hpctrain stand on them.

Made of hpctrain.api: `buckets`, flat buckets of gradients; `bucketed`, a sharded model that fills and reduces them;
`partitioned`, one whose ranks own slices of them, with `slices` and `offload`; `checkpoint`, files, snapshots, checksums;
`cache`, files that are costly to make, kept for later jobs; `attention`, parts of attention that add up; `scripts`, batch scripts,
and the commands of schedulers.

Doors to a room of hpctrain's each, with the names in their `__all__`: `commands`, what a command is made of; `jobs`, jobs read,
checked and trained; `runs`, the files of a run; `starting`, ranks here, under mpiexec and on hosts; `launcher_variables`, a
rank's variables; `requests`, questions to a running job; `store`, the guarded store; `groups`, process groups of one's own.
"""
