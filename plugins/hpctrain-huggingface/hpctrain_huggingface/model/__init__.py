"""The plugin `[model] name = "huggingface"`.

options.py -> building.py (the module on the meta device) -> weights.py, initial.py (its values by rows); tasks.py says what goes
in and which loss comes out, adapters.py adds peft's, plan.py cuts for tensor parallelism.
"""
