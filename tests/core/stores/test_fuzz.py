"""Three seconds of nonsense, 30 with --all; `make fuzz-stores` takes ten minutes."""

from pathlib import Path

from tests.support.programs import python


def test_nonsense_does_no_harm(request):
    seconds = "30" if request.config.option.all else "3"
    done = python(Path(__file__).with_name("fuzz.py"), seconds, limit_s=200.0)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 7, done.stdout
