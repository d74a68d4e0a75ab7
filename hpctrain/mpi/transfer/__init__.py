"""The movement of bytes: a communicator's messages, a node's memory, and the wait for both under a time limit."""
