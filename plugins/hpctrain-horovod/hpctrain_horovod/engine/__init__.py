"""Named operations between the processes of a job, in whatever order each process submits them."""
