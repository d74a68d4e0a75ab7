"""The kit: trains a plugin's job in many layouts and compares with one process, with the plugin that hpctrain has in its place, and
with itself resumed. A plugin that passes it is right."""
