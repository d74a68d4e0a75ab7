"""The communicator horovod: data parallelism over an installed Horovod."""
