"""A directory for PYTHONPATH, from which `import horovod` finds hpctrain.horovod; `hpctrain horovodrun` puts it there."""
