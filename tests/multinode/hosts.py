"""Two hosts on one machine: network namespaces joined by a cable, each with its own processes and addresses.

A host is a namespace for the network and one for processes, held open by its first process. When that is gone the
kernel kills whatever runs on the host and takes the namespaces and the cable away: nothing is left to clean up, also
where the test itself is killed. The hosts share the file system, as the nodes of a cluster do.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ADDRESSES = ("10.199.0.1", "10.199.0.2")
INTERFACE = "cable"

# Says which process it is, by its number outside, then waits for the end of its input, which comes at the latest when
# the test's process dies.
_HOLD = "read -r pid rest < /proc/self/stat; echo $pid; exec cat"


class Host:
    """A machine of its own to what runs on it, but for the file system."""

    def __init__(self, address: str, make: Sequence[str]) -> None:
        """`make` is the command that makes the namespaces and runs what follows in them. Raises OSError where it may
        not."""
        self.address = address
        self._holder = subprocess.Popen(
            [*make, "sh", "-c", _HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self._holder.stdout is not None
        said = self._holder.stdout.readline().strip()
        if not said:
            raise OSError(self._holder.communicate()[1].strip())
        self.pid = int(said)
        self._started: list[subprocess.Popen[bytes]] = []

    def start(
        self, command: Sequence[str], output: Path, environment: Mapping[str, str], folder: Path
    ) -> subprocess.Popen[bytes]:
        """Run a command on this host, in `folder`; what it prints goes to the file `output`."""
        with output.open("wb") as file:
            command = [*enter(self.pid, "--net", "--pid"), *command]
            self._started.append(
                subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, cwd=folder
                )
            )
        return self._started[-1]

    def ip(self, command: str) -> None:
        """Set up the network of this host."""
        subprocess.run(
            [*enter(self.pid, "--net"), "ip", *command.split()], check=True, capture_output=True, text=True, timeout=10
        )

    def shut_down(self) -> None:
        """End everything that runs on this host; returns when it is gone."""
        if self._holder.poll() is None:
            os.kill(
                self.pid, signal.SIGKILL
            )  # the first process of its namespace, whose parent hears of it when all others have ended
        self._holder.communicate(timeout=20)
        for process in self._started:
            process.wait(20)


def enter(pid: int, *namespaces: str) -> list[str]:
    """The command that runs what follows in namespaces of a process; an ordinary user owns them through a user
    namespace."""
    return [
        "nsenter",
        "--target",
        str(pid),
        *(["--user", "--preserve-credentials"] if os.geteuid() else []),
        *namespaces,
    ]


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts that reach each other under `ADDRESSES`, and nothing else. Raises OSError with the reason where that is
    not permitted."""
    missing = [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]
    if missing or sys.platform != "linux":
        raise OSError(
            f"namespaces need Linux with {', '.join(missing) or 'unshare, nsenter and ip'} (Debian: util-linux, "
            "iproute2)"
        )
    make = ["unshare", "--net", "--pid", "--fork", "--kill-child=SIGKILL"]
    hosts: list[Host] = []
    try:
        hosts.append(Host(ADDRESSES[0], [*make, *(["--user", "--map-root-user"] if os.geteuid() else [])]))
        # For an ordinary user in the user namespace of the first, so that the cable may have an end in each.
        hosts.append(Host(ADDRESSES[1], [*(enter(hosts[0].pid) if os.geteuid() else []), *make]))
        try:
            hosts[0].ip(f"link add {INTERFACE} type veth peer name {INTERFACE} netns {hosts[1].pid}")
            for host in hosts:
                host.ip(f"address add {host.address}/24 dev {INTERFACE}")
                host.ip(f"link set {INTERFACE} up")
                host.ip("link set lo up")
        except subprocess.CalledProcessError as error:
            raise OSError(error.stderr.strip()) from error
        yield hosts[0], hosts[1]
    finally:
        for host in reversed(hosts):
            host.shut_down()
