"""hpctrain_horovod under Horovod's name."""

import importlib
import sys

try:
    from hpctrain_horovod.alias import install
except ModuleNotFoundError as error:
    if error.name not in ("hpctrain", "hpctrain_horovod"):
        raise
    raise ModuleNotFoundError(
        f"horovodrun: {sys.executable} has no hpctrain-horovod; start the script with the Python beside horovodrun, which has"
    ) from None

del sys.modules[__name__]
install()
importlib.import_module("horovod")
