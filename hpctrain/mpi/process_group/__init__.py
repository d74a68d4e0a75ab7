"""torch's process group: checks the arguments, queues operations, runs them, and returns their handles."""
