"""`python -m lockstep` is the command `lockstep`."""

import sys

from lockstep.trainer.cli.main import main

sys.exit(main())
