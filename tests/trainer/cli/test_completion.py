"""`lockstep completion`: what a shell offers."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from lockstep.trainer.cli.completion import bash, fish, zsh
from lockstep.trainer.cli.main import main

OFFERED = """
{script}
COMP_WORDS=({words})
COMP_CWORD={index}
compopt() {{ :; }}
_lockstep
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("lockstep che", ["checkpoint"]),
        ("lockstep fit max_s", ["max_steps="]),
        ("lockstep checkpoint ver", ["verify"]),
        ("lockstep completion f", ["fish"]),
        ("lockstep runs nothing-here", [""]),
    ],
)
def test_bash_offers_commands_and_arguments(words: str, offered: list[str]) -> None:
    script = OFFERED.format(script=bash(), words=words, index=len(words.split()) - 1)
    said = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=20, check=True)
    assert said.stdout.splitlines() == offered


@pytest.mark.ranks
@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_can_read_their_scripts(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = {"zsh": zsh, "fish": fish}[shell]()
    subprocess.run([shell, "-n"], input=script, text=True, timeout=20, check=True)


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert "'tcsh'" in capsys.readouterr().err
    assert main(["completion", "fish"]) == 0
    assert "-a 'show verify diff export import'" in capsys.readouterr().out
