"""A rank that is done ends like any Python process, except that nobody takes the interpreter apart under its threads."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import atexit, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from hpctrain.ranks.process import end_process

class Witness:
    def __del__(self):
        print("taken apart", flush=True)

witness = Witness()
atexit.register(print, "handler")
threading.Thread(target=lambda: (time.sleep(0.3), print("thread"))).start()
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
pool = ThreadPoolExecutor(1)
pool.submit(int)  # its thread now waits for more
sys.stdout.write("half a line, ")
end_process(75)
"""


def test_threads_and_handlers_and_output_are_waited_for_and_the_interpreter_stays_whole() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (75, "half a line, thread\nhandler\n", "")
