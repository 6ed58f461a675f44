"""`unisono --print-completion`: real shells offer what the parsers take."""

from __future__ import annotations

import argparse
import os
import pty
import select
import shlex
import shutil
import subprocess
import sys
import time
import tty
from pathlib import Path

import pytest

from unisono.workbench.cli.main import main, make_parser

FOLDERS = ["sub"]
FILES = ["other.txt", "train.py", "trial.py"]

BASH = """
source ./script
while read -r line; do
    COMP_WORDS=() COMPREPLY=()
    IFS=, read -ra COMP_WORDS <<<"$line"
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    # A last word that is empty is written as ''.
    COMP_WORDS[COMP_CWORD]=${COMP_WORDS[COMP_CWORD]#"''"}
    _shtab_unisono
    printf '%s\\n' "${COMPREPLY[@]}" ==
done
"""

FISH = """
source script
while read line
    complete -C "$line" | string split -f 1 \\t
    echo ==
end
"""

# Candidates go to a file; Control-T ends a question.
ZSH = r"""
fpath=($PWD/.functions $fpath)
autoload -Uz compinit
compinit -u -D
compadd() {
    local -a found
    if [[ ${@[1,(i)(-|--)]} != *-[OAD]\ * ]]; then
        builtin compadd -A found "$@"
        print -rl -- $found >>answers
    fi
    builtin compadd "$@"
}
finish() { print -- '==' >>answers; BUFFER= }
zle -N finish
bindkey '^T' finish
bindkey '^I' complete-word
"""


def parsers():
    """Yield the words of each command, and its parser."""
    parser = make_parser()
    yield ["unisono"], parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield ["unisono", name], command


def questions():
    """Yield words, of which the last is to be completed, and what must be offered."""
    for words, parser in parsers():
        shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
        yield [*words, "-"], {name for action in shown for name in action.option_strings}
        for action in shown:
            if action.choices and action.option_strings:
                for name in action.option_strings:
                    yield [*words, name, ""], set(action.choices)
            elif action.choices:
                yield [*words, ""], set(action.choices)
    yield ["unisono", "bench", "all_"], {"all_reduce", "all_gather", "all_to_all"}
    yield ["unisono", "run", "--fold", "al"], {"always"}
    for option in ("--error-json", "--dry-run"):
        yield ["unisono", "run", option, "tr"], {"train.py", "trial.py"}
    for option in ("-n", "--nnodes"):
        yield ["unisono", "run", option, "2", "trai"], {"train.py"}
    yield ["unisono", "run", "train.py", "ot"], {"other.txt"}
    yield ["unisono", "run", "--log-dir", ""], {"sub"}


QUESTIONS = list(questions())


def piped(command, lines):
    """The output of a shell that reads questions, line by line."""
    done = subprocess.run(
        command, input="\n".join(lines) + "\n", capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def ask_bash():
    lines = [",".join([*words[:-1], words[-1] or "''"]) for words, _ in QUESTIONS]
    return piped(["bash", "--norc", "-c", BASH], lines)


def ask_fish():
    return piped(["fish", "--no-config", "-c", FISH], [" ".join(words) for words, _ in QUESTIONS])


def ask_zsh():
    """Type the questions in a terminal, because zsh completes nowhere else."""
    Path(".functions").mkdir()
    shutil.copy("script", ".functions/_unisono")
    Path(".rc").write_text(ZSH, encoding="utf-8")
    typed = "source .rc\n" + "".join(" ".join(words) + "\t\x14" for words, _ in QUESTIONS)
    pending, output = (typed + "exit\n").encode(), b""
    terminal, inside = pty.openpty()
    tty.setraw(inside)  # otherwise a terminal drops what is typed ahead beyond 4 KiB
    env = {**os.environ, "TERM": "dumb", "HOME": os.getcwd()}
    shell = subprocess.Popen(
        ["zsh", "-f", "-i"], stdin=inside, stdout=inside, stderr=inside, env=env, process_group=0
    )
    os.close(inside)
    try:
        limit_s = time.monotonic() + 60
        while time.monotonic() < limit_s:
            readable, writable, _ = select.select([terminal], [terminal] if pending else [], [], 1)
            if writable:
                pending = pending[os.write(terminal, pending[:64]) :]
            if readable:
                output += os.read(terminal, 1 << 16)
    except OSError:  # zsh has ended
        pass
    finally:
        os.close(terminal)
        shell.kill()
        shell.wait()
    assert os.path.exists("answers"), output
    return Path("answers").read_text(encoding="utf-8")


ASK = {"bash": ask_bash, "fish": ask_fish, "zsh": ask_zsh}


@pytest.mark.parametrize("shell", ASK)
def test_shell_offers_what_the_parsers_take(shell, tmp_path, monkeypatch, capsys):
    pytest.importorskip("shtab")
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    monkeypatch.chdir(tmp_path)
    for name in FOLDERS:
        (tmp_path / name).mkdir()
    for name in FILES:
        (tmp_path / name).touch()
    with pytest.raises(SystemExit, match="0"):
        main(["--print-completion", shell])
    (tmp_path / "script").write_text(capsys.readouterr().out, encoding="utf-8")
    answers = ASK[shell]().split("==\n")[: len(QUESTIONS)]
    found = [{word.rstrip("/") for word in answer.split("\n") if word} for answer in answers]
    assert len(found) == len(QUESTIONS)
    wrong = {
        shlex.join(words): {"extra": got - expected, "missing": expected - got}
        for (words, expected), got in zip(QUESTIONS, found, strict=True)
        if got != expected
    }
    assert wrong == {}


def test_absence_of_shtab_is_an_error_with_a_hint(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["--print-completion", "bash"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "needs the package shtab" in shown.err
    assert "pip install 'unisono[cli]'" in shown.err
