"""Life-cycle hooks that a job turns on."""
