"""Building blocks for plugins: the strategies, formats and commands that come with hpctrain stand on them.

Made of hpctrain.api: `buckets`, flat buckets of gradients; `bucketed`, a sharded model that fills and reduces them;
`partitioned`, one whose ranks own slices of them, with `offload`; `checkpoint`, files, snapshots, checksums; `cache`, files that
are costly to make, kept for later jobs; `attention`, parts of attention that add up; `scripts`, batch scripts, and the commands
of schedulers.

`commands` has the parts of a command, and imports no torch. In hpctrain's other modules, the names in `__all__` are public.
"""
