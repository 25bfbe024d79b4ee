"""Runs in processes of their own: a test file is its own child script, which imports once and forks for each run."""

import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


ROOT = Path(__file__).parent.parent


def forked(task: Callable[[], None], processes: int) -> list[int]:
    """Run a task in processes of its own, which form a process group if they are several.

    Returns:
        Their exit codes, negative for a signal.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(processes):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                if processes > 1:
                    os.environ |= {
                        "RANK": str(rank),
                        "LOCAL_RANK": str(rank),
                        "WORLD_SIZE": str(processes),
                        "LOCAL_WORLD_SIZE": str(processes),
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": str(port),
                    }
                task()
                code = 0
            except SystemExit as ended:
                code = ended.code
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    codes = []
    for child in children:
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        if codes[-1] != 0:  # the others wait for it
            for other in children:
                if other != child:
                    with suppress(ProcessLookupError):
                        os.kill(other, signal.SIGKILL)
    return codes


def run_module(module: str, directory: Path, timeout: float = 600) -> None:
    """Run `python -m module directory` to its end."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, str(directory)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=timeout,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-5000:]
