"""Building blocks for plugins, made of hpctrain.api: the strategies and formats that come with hpctrain stand on them.

buckets: flat buckets of gradients. bucketed: a sharded model that fills and reduces them. checkpoint: files, snapshots, checksums.
cache: files that are costly to make, kept for later jobs. scripts: batch scripts, and the commands of schedulers.
"""
