"""A directory for PYTHONPATH, from which `import horovod` finds hpctrain_horovod; `hpctrain horovodrun` puts it there."""
