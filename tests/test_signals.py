"""USR1, USR2 and TERM at any moment: exit 75 and nothing half-written, or the run is finished."""

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.comm.launching import ROOT, clean_environment
from tests.crash.runs import Material, lines
from tiledseg.checkpoint.folder import newest_checkpoint
from tiledseg.system.signals import SIGNALS, Stopped, exit_code_of, is_met, listening
from tiledseg.train import main as train

SECONDS = 90


def program(*arguments: str) -> subprocess.Popen[str]:
    """A variable of torch's, as batch scripts set them, has torch imported before the command."""
    environment = {**clean_environment(), "TORCH_SHOW_CPP_STACKTRACES": "0"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-m", *arguments], **pipes, cwd=ROOT, env=environment, text=True)


def wait_until_listening(pid: int) -> None:
    """Until the process catches the signals: before that it is Python's own start, of which no program knows."""
    wanted = sum(1 << (number - 1) for number in SIGNALS)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        status = Path(f"/proc/{pid}/status").read_text()
        caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
        if int(caught, 16) & wanted == wanted:
            return
        time.sleep(0.002)
    raise AssertionError(f"process {pid} never listened")


def signalled(process: subprocess.Popen[str], number: int, seconds: float) -> tuple[int, str]:
    """The exit code and standard error of a process that gets a signal `seconds` after it listens."""
    wait_until_listening(process.pid)
    time.sleep(seconds)
    if process.poll() is None:
        process.send_signal(number)
    err = process.communicate(timeout=SECONDS)[1]
    return process.returncode, err


def test_training_at_any_moment(material: Material) -> None:
    """From the first import on; the folder is absent, or the run goes on in it to its end."""
    for number, seconds in ((signal.SIGTERM, 0.0), (signal.SIGUSR1, 1.2)):
        folder = material.root / number.name
        code, err = signalled(training(material, folder), number, seconds)
        finished = (folder / "summary.json").exists() and '"finished": true' in (folder / "summary.json").read_text()
        assert code == 75 or (code == 0 and finished), (seconds, code, err)
        assert "Traceback" not in err
        assert "error" not in err
        assert not list(folder.rglob(".*")), seconds
    if folder.exists():
        assert train(material.train_command(folder)[1:]) == 0
        assert lines(folder)[-1]["step"] == 12


def training(material: Material, folder: Path, *options: str) -> subprocess.Popen[str]:
    return program("tiledseg.train", *material.train_command(folder)[1:], *options)


def test_term_in_training_leaves_its_checkpoint(material: Material) -> None:
    folder = material.root / "in-training"
    process = training(material, folder, "--train.epochs", "4000")
    end = time.monotonic() + SECONDS
    while not (folder / "checkpoints" / "latest").exists() and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(SECONDS) == 75
    newest = newest_checkpoint(folder / "checkpoints")
    assert newest is not None
    assert newest.saved.step == lines(folder)[-1]["step"]


def test_a_scene_of_several_threads_leaves_nothing(tmp_path: Path) -> None:
    """The signal goes to the process group, as from a batch system."""
    size = ("--size", "6000", "6000", "--workers", "2")
    files = ("--image", str(tmp_path / "a.tif"), "--labels", str(tmp_path / "b.tif"))
    command = [sys.executable, "-m", "tiledseg.scene", *size, *files]
    with subprocess.Popen(
        command, cwd=ROOT, env=clean_environment(), stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        wait_until_listening(process.pid)
        time.sleep(0.3)
        os.killpg(process.pid, signal.SIGUSR1)
        err = process.communicate(timeout=SECONDS)[1]
    assert process.returncode == 75, err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_in_a_command_unwinds_it_once(number: signal.Signals) -> None:
    former = signal.getsignal(number)
    unwound = []

    def command() -> None:
        with listening():
            try:
                os.kill(os.getpid(), number)
            finally:
                os.kill(os.getpid(), number)  # a second one does not disturb the unwinding
                unwound.append(is_met())

    with pytest.raises(Stopped, match=f"stopped by {number.name}"):
        command()
    assert unwound == [True]
    assert signal.getsignal(number) == former


def test_a_launcher_that_returns_the_largest_code_is_told_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """srun ends the others by TERM where one has failed: 75 would submit the failing job again."""
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS", raising=False)
    assert [exit_code_of(number) for number in SIGNALS] == [75, 75, 75]
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert [exit_code_of(number) for number in SIGNALS] == [75, 75, 143]


@pytest.mark.parametrize("on_mesh", [False, True])
def test_a_stop_that_somebody_swallows_is_one_all_the_same(on_mesh: bool) -> None:
    """Native code that imports a module may: what fails then, at a module that is half there, is no fault of the input.
    Seen once: TERM while numpy was imported, then "cannot open image.tif: module 'numpy' has no attribute 'void'"."""
    program_text = (
        "import contextlib, os, signal, sys\n"
        "from tiledseg.comm.session import run_on_mesh\n"
        "from tiledseg.commands.parser import run\n"
        "from tiledseg.errors import RasterError\n"
        "def body(mesh=None):\n"
        "    with contextlib.suppress(BaseException):\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        signal.sigtimedwait([], 5)\n"
        "    raise RasterError('cannot open image.tif: numpy is half there')\n"
        f"sys.exit(run(lambda: run_on_mesh(body)) if {on_mesh} else run(body))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program_text], env=clean_environment(), capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 75, done.stderr
    assert done.stderr.splitlines() == ["stopped by SIGTERM: run the command again"]


def test_a_stop_within_an_import_comes_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Native code that initialises a module ends the process where Python raises in it: seen once, TERM in torch's
    import, then an abort."""
    text = "import os, signal, time\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(0.1)\nDONE = True\n"
    (tmp_path / "module_that_is_stopped.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)

    def body() -> None:
        with listening():
            importlib.import_module("module_that_is_stopped")
            time.sleep(SECONDS)

    with pytest.raises(Stopped):
        body()
    assert sys.modules.pop("module_that_is_stopped").DONE
