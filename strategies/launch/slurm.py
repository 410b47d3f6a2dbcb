"""What Slurm is asked and what it says: requeue this job, and the hosts in its short form of a list."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping


def requeue(environ: Mapping[str, str] = os.environ) -> str | None:
    """Requeue this Slurm job if LOCKSTEP_REQUEUE=1; return what was done, as a line, or None.

    One rank calls it, once a checkpoint is committed. What `scontrol` refuses is said, not raised.
    """
    job = environ.get("SLURM_JOB_ID")
    if environ.get("LOCKSTEP_REQUEUE") != "1" or not job:
        return None
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        return f"job {job} could not be requeued: {error}"
    if done.returncode == 0:
        return f"job {job} was requeued"
    return f"job {job} could not be requeued: {(done.stderr or done.stdout).strip()}"


def expand_hosts(hosts: str) -> list[str]:
    """Expand Slurm's list of hosts: `gpu[01-03,7],login` is gpu01, gpu02, gpu03, gpu7, login. Raises ValueError."""
    names: list[str] = []
    for item in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", hosts):
        expanded = [""]
        for literal, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", item):
            expanded = [
                prefix + suffix
                for prefix in expanded
                for suffix in ([literal] if literal else _expand_ranges(ranges, hosts))
            ]
        names += expanded
    if not names or hosts.count("[") != hosts.count("]"):
        raise ValueError(
            f"A Slurm node list looks like gpu[01-03,7],login, but it is {hosts!r}: correct SLURM_STEP_NODELIST or "
            "SLURM_JOB_NODELIST"
        )
    return names


def _expand_ranges(ranges: str, hosts: str) -> list[str]:
    numbers = []
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise ValueError(
                f"A range in a Slurm node list looks like [01-03,7], but {hosts!r} has [{ranges}]: correct "
                "SLURM_JOB_NODELIST"
            )
        low, high = match[1], match[2] or match[1]
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return numbers
