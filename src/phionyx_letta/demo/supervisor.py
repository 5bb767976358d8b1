"""The small process that stands between us and a server, so that the server never outlives us.

It is run by path, as ``python -I -S supervisor.py GRACE SIGNAL FOLDER COMMAND…``, and needs the standard library
only. It starts COMMAND in a session of its own, says ``PID n`` on its standard output and, when the command ends,
``EXIT code``. Its standard input is a pipe whose other end only the parent holds: when that closes, because the
parent asked or because it died of anything, SIGKILL included, the command's process group gets SIGNAL, after GRACE
seconds SIGKILL, and FOLDER is removed.

It does not restart anything and reads nothing from the pipe.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time


def main(arguments: list[str]) -> int:
    """Supervise one command; return 0, or 127 when it could not be started (standard error says why)."""
    grace, stop_signal, folder, *command = arguments
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)  # the pipe alone decides: a terminal's Ctrl-C is the parent's business
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True, preexec_fn=_default_signals
        )
    except OSError as error:
        print(f"{command[0]}: {error}", file=sys.stderr, flush=True)
        _say("EXIT 127")
        _wait_for_end_of_input()
        shutil.rmtree(folder, ignore_errors=True)
        return 127
    _say(f"PID {child.pid}")
    stopper = threading.Thread(target=_stop_with_parent, args=(child, int(stop_signal), float(grace)))
    stopper.start()
    code = child.wait()
    _kill_group(child.pid)  # whatever the command had started and left
    _say(f"EXIT {code}")
    stopper.join()
    shutil.rmtree(folder, ignore_errors=True)
    return 0


def _default_signals() -> None:
    """Undo, in the child, what this process ignores: ignored signals are inherited."""
    for restored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(restored, signal.SIG_DFL)


def _say(line: str) -> None:
    """Tell the parent, which may be gone."""
    with contextlib.suppress(OSError):
        os.write(1, line.encode() + b"\n")


def _wait_for_end_of_input() -> None:
    while os.read(0, 4096):
        pass


def _stop_with_parent(child: subprocess.Popen[bytes], stop_signal: int, grace: float) -> None:
    """Wait for the pipe to close, then end the command: politely, and after ``grace`` seconds by force."""
    _wait_for_end_of_input()
    deadline = time.monotonic() + grace
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, stop_signal)
    while child.poll() is None:
        if time.monotonic() > deadline:
            _kill_group(child.pid)
        time.sleep(0.02)


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
