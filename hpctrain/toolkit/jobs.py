"""Jobs as a program reads, checks, changes and trains them, and what their parts build. Imports torch.

`run` trains a job's tables, which `read_job` gives, on the ranks that call it; a plugin named in `[plugins] load` and `[[hook]]` of
the tables sees its steps and their rows.
"""

from hpctrain.checking.check import CheckedJob, check
from hpctrain.job.parts import Parts
from hpctrain.job.raw import RawJob
from hpctrain.job.reading import read_job
from hpctrain.model.parameters import build_optimizer, parameter_groups
from hpctrain.plugins.registry import build_registry
from hpctrain.training.loading import export_pretrained
from hpctrain.training.rank import run

__all__ = [
    "CheckedJob",
    "Parts",
    "RawJob",
    "build_optimizer",
    "build_registry",
    "check",
    "export_pretrained",
    "parameter_groups",
    "read_job",
    "run",
]
