"""`lockstep plan`: what a run will need in memory, communication, time and money, without its devices."""

from lockstep.trainer.cli.plan.command import main as main
from lockstep.trainer.cli.plan.command import parse as parse
