"""Building blocks for plugins: the strategies, formats and commands that come with hpctrain stand on them.

Made of hpctrain.api: `buckets`, flat buckets of gradients; `bucketed`, a sharded model that fills and reduces them; `checkpoint`,
files, snapshots, checksums; `cache`, files that are costly to make, kept for later jobs; `scripts`, batch scripts, and the commands
of schedulers.

"""
