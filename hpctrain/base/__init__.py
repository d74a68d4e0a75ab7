"""The base of every room: errors, files, JSON, random numbers, devices, the store, and all private names of torch in one file."""
