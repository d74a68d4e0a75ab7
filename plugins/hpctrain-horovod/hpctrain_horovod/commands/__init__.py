"""Commands of hpctrain: horovodrun, and bench horovod."""
