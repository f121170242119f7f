"""Processes and ports of this machine: who carries our mark, who holds a port, and how to end exactly those.

Everything a head starts inherits an environment variable with a random id (MARK), also what is re-parented later:
HAProxy, vLLM's engine processes, job drivers. So what belongs to a head is found by that id, never by a program's
name, and a PID that was given to another program meanwhile is never touched.
"""

import contextlib
import os
import socket
import time

import psutil

MARK = "RANKLINE_CLUSTER_ID"


def marked(cluster_id: str) -> list[psutil.Process]:
    """Live processes that carry the id, with their descendants; never this process or one above it."""
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == cluster_id and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = process
    for process in list(found.values()):
        with contextlib.suppress(psutil.Error, OSError):
            found |= {child.pid: child for child in process.children(recursive=True)}
    return [process for pid, process in found.items() if pid not in own]


def end(cluster_id: str, *, last: str = "gcs_server", patience_s: float = 10.0) -> int:
    """End every process that carries the id: SIGTERM, then SIGKILL after `patience_s`. Returns how many there were.

    Looks again until none is left, since a process may start another one while it is being ended. The program named
    `last` is asked when the others are gone: without its control store Ray's other processes wait, and do not end.
    """
    asked: set[tuple[int, float]] = set()
    started = time.monotonic()
    while left := marked(cluster_id):
        late = time.monotonic() - started > patience_s
        if late and time.monotonic() - started > patience_s + 20:
            raise TimeoutError(f"processes {[process.pid for process in left]} do not end, not even on SIGKILL")
        for process in left:
            # psutil compares start times before it sends a signal, so a reused PID is left alone.
            with contextlib.suppress(psutil.Error):
                key = (process.pid, process.create_time())
                if late:
                    process.kill()
                elif key not in asked and (process.name() != last or len(left) == 1):
                    process.terminate()
                else:
                    continue
                asked.add(key)
        time.sleep(0.1)
    return len(asked)


def holder(port: int) -> str | None:
    """Who listens on a TCP port here: "PID 123 (name)", "another user's process", or None when it is free."""
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
            if connection.pid is None:
                return "another user's process"
            with contextlib.suppress(psutil.Error):
                return f"PID {connection.pid} ({psutil.Process(connection.pid).name()})"
            return f"PID {connection.pid}"
    return None


def free_port(preferred: int | None = None) -> int:
    """A TCP port that nothing holds on loopback: the preferred one if it is free."""
    for port in (preferred, 0) if preferred else (0,):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return probe.getsockname()[1]
    raise OSError("no free TCP port on 127.0.0.1")
