"""The names of the files beside the shards."""

METADATA_FILE = ".metadata"
"""torch's own table of contents."""
VALUES_FILE = "hpctrain.json"
"""The values of a checkpoint, and the checksum of the table."""
