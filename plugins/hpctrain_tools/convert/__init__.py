"""Configurations of other libraries as job files: rules.py -> deepspeed.py, accelerate.py -> conversion.py, which writes one."""
