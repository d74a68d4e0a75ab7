"""The job file: TOML with the place of each key, and the typed Job that it becomes."""
