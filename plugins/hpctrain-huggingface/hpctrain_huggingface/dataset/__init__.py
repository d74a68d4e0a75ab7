"""The plugin `[dataset] name = "huggingface"`.

options.py -> opening.py (rows of a data set of Hugging Face) -> encoding.py (a row as ids and labels) -> samples.py.
"""
