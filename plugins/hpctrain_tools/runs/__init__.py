"""The files of a run as typed values, while it runs and afterwards. Imports no torch, for commands.

The directory may be another person's, and crafted: what cannot be read counts as absent, and texts are as the files have them.
"""

from hpctrain_tools.runs.following import Follower, Part, parts_of
from hpctrain_tools.runs.log_seen import KILLED, OF_ANOTHER, Failure, LogLine, LogSeen, LogStart, find_failure, read_log
from hpctrain_tools.runs.log_tail import last_lines
from hpctrain_tools.runs.rows import Evaluation, Step, Straggler, is_evaluation, read_row
from hpctrain_tools.runs.run_directory import JobSeen, RunDirectory
from hpctrain_tools.runs.standing import Standing, standing_of
from hpctrain_tools.runs.starts_seen import Lost, Start, StartsSeen, read_starts

__all__ = [
    "KILLED",
    "OF_ANOTHER",
    "Evaluation",
    "Failure",
    "Follower",
    "JobSeen",
    "LogLine",
    "LogSeen",
    "LogStart",
    "Lost",
    "Part",
    "RunDirectory",
    "Standing",
    "Start",
    "StartsSeen",
    "Step",
    "Straggler",
    "find_failure",
    "is_evaluation",
    "last_lines",
    "parts_of",
    "read_log",
    "read_row",
    "read_starts",
    "standing_of",
]
