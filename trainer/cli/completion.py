"""`lockstep completion bash|zsh|fish`: a script that completes commands, the Trainer's arguments and files."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lockstep.trainer.cli.parser import COMMANDS, page, trainer_arguments

USAGE = "lockstep completion bash|zsh|fish"

EXAMPLES = """
examples:
  eval "$(lockstep completion bash)"                                       # in ~/.bashrc
  eval "$(lockstep completion zsh)"                                        # in ~/.zshrc, after compinit
  lockstep completion fish > ~/.config/fish/completions/lockstep.fish
"""

CONFIGURED = ("fit", "validate", "test", "predict", "config", "plan", "compare")
"""Commands that take config files and keys."""
WORDS = {"checkpoint": "show verify diff export import", "completion": "bash zsh fish"}
"""What may follow other commands."""


def main(words: Sequence[str]) -> int:
    """Print the script for a shell."""
    print({"bash": bash, "zsh": zsh, "fish": fish}[parse(words).shell]())
    return 0


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The arguments. Raises ConfigError for a wrong one."""
    parser = page(USAGE, __doc__, EXAMPLES)
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    return parser.parse_args(words)


def keys() -> list[str]:
    """What may stand before `=`."""
    return ["module.", "data.", "optimizer.", "lr_scheduler.", "vars.", "ckpt_path=", "output="] + [
        f"{name}=" for name in trainer_arguments()
    ]


def bash() -> str:
    cases = "".join(f"        {name}) words='{words}' ;;\n" for name, words in WORDS.items())
    return f"""_lockstep() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} words=
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W '{" ".join(COMMANDS)}' -- "$word"))
        return
    fi
    case ${{COMP_WORDS[1]}} in
        {"|".join(CONFIGURED)}) words='{" ".join(keys())}' ;;
{cases}    esac
    COMPREPLY=($(compgen -W "$words" -- "$word") $(compgen -f -- "$word"))
    case ${{COMPREPLY[0]}} in *= | *.) compopt -o nospace ;; esac
}}
complete -o filenames -F _lockstep lockstep"""


def zsh() -> str:
    cases = "".join(f"        {name}) compadd -- {words} ;;\n" for name, words in WORDS.items())
    return f"""_lockstep() {{
    if (( CURRENT == 2 )); then
        compadd -- {" ".join(COMMANDS)}
        return
    fi
    case $words[2] in
        {"|".join(CONFIGURED)}) compadd -S '' -- {" ".join(keys())} ;;
{cases}    esac
    _files
}}
compdef _lockstep lockstep"""


def fish() -> str:
    lines = [
        f"complete -c lockstep -n __fish_use_subcommand -f -a {name} -d '{text.replace(chr(39), '')}'"
        for name, text in COMMANDS.items()
    ]
    after = {" ".join(CONFIGURED): " ".join(keys())} | WORDS
    lines += [
        f"complete -c lockstep -n '__fish_seen_subcommand_from {commands}' -a '{words}'"
        for commands, words in after.items()
    ]
    return "\n".join(lines)
