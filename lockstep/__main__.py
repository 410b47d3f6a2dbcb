"""`python -m trainer` is the command `lockstep`."""

import sys

from trainer.cli import main

sys.exit(main())
