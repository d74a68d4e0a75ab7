"""torch's process group: checks what callers pass, queues operations, runs them, and hands out their handles."""
