"""What planning costs itself: `lockstep plan` of Llama 405B on 512 ranks, in CPU seconds and resident memory.

python -m benchmarks.plan_speed
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys

COMMAND = (
    "plan examples/llama.yaml module.size=405B module.context=8192 data.batch_size=64 precision=bf16-mixed "
    "strategy=fsdp=64,tensor=8 --devices 512 --gpu h100-80"
)


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    run = subprocess.run([sys.executable, "-m", "lockstep", *COMMAND.split()])
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"\n{used.ru_utime + used.ru_stime:.0f} CPU seconds, {used.ru_maxrss / 2**20:.2f} GiB")
    return 0 if run.returncode in (0, 1) else run.returncode  # 1: it does not fit


if __name__ == "__main__":
    sys.exit(main())
