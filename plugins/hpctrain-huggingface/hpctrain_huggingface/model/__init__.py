"""The plugin `[model] name = "huggingface"`.

plugin.py chooses a kind of model in spec.py or preference.py. building.py makes the module on the meta device by the keys in
options.py, weights.py and initial.py its values by rows. tasks.py says what goes in and which loss comes out, adapters.py adds
peft's, plan.py cuts for tensor parallelism, layers.py for pipelines, attention.py for context parallelism; exporting.py writes.
"""
