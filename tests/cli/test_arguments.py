"""The command line before its commands run: help, versions and wrong arguments, without torch."""

import functools
import os
import resource
import signal
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

import omniattn
from omniattn.cli import main
from omniattn.cli.arguments import COMMANDS, FAMILIES, PIPELINE_SCHEDULES
from omniattn.models.presets import TRAINED
from omniattn.training.pipeline import SCHEDULES

#: The console script, and the module as Python runs it.
SCRIPT = "import sys; sys.argv[0] = 'omniattn'; from omniattn_cli import main; sys.exit(main())"
WAYS = (["-c", SCRIPT], ["-m", "omniattn"])


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True)


@pytest.mark.parametrize("way", WAYS, ids=["script", "module"])
@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], *([c, "--help"] for c in COMMANDS)]
)
def test_help_does_not_import_torch(way, arguments):
    result = run("-X", "importtime", *way, *arguments)
    assert result.returncode == 0, result.stderr
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "omniattn.cli.arguments" in imported
    assert not {"torch", "numpy"} & imported
    wanted = f"omniattn {omniattn.__version__}" if arguments == ["--version"] else "usage: omniattn"
    assert result.stdout.startswith(wanted)


def test_help_is_fast():
    """Measured in CPU seconds, which other processes affect least."""

    def seconds() -> float:
        return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])

    taken = []
    for _ in range(3):
        before = seconds()
        assert run("-m", "omniattn", "train", "--help").returncode == 0
        taken.append(seconds() - before)
    assert min(taken) < 0.3


def test_only_the_command_line_defers_torch():
    """Other modules of the package and programs that import it have the ops at once."""
    code = "import omniattn, torch; torch.ops.omniattn.cpu_isa()"
    assert run("-c", code).returncode == 0
    deferred = "import omniattn_cli, omniattn, sys; assert 'torch' not in sys.modules; " + (
        "omniattn.functional; omniattn.load(); import torch; torch.ops.omniattn.cpu_isa()"
    )
    result = run("-c", deferred)
    assert result.returncode == 0, result.stderr


def test_models_are_listed_by_family(capsys):
    names = [name for family in FAMILIES.values() for name in family]
    assert sorted(names) == sorted(TRAINED)
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = capsys.readouterr().out
    for family, names in FAMILIES.items():
        assert f"  {family}:\n    {names[0]}," in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "omniattn: the following arguments are required: command"),
        (["trin"], "omniattn: argument command: invalid choice: 'trin'"),
        (["info", "--jason"], "omniattn info: unrecognized arguments: --jason"),
        (["info", "extra"], "omniattn info: unrecognized arguments: extra; omniattn info --help"),
        (["check", "--json"], "omniattn check: unrecognized arguments: --json; omniattn check --"),
        (["hub"], "omniattn hub: the following arguments are required: DIR"),
    ],
)
def test_a_wrong_argument_is_one_line(capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(message)


def test_an_installed_package_has_the_script():
    installed = entry_points(group="console_scripts", name="omniattn")
    if not installed:
        pytest.skip("the package is on the path, not installed")
    (script,) = installed
    assert script.value == "omniattn_cli:main"


def test_an_interrupt_while_torch_is_imported_is_one_line(tmp_path):
    """The import takes seconds; here it takes as long as the test likes."""
    slow = "import time; print('ready', flush=True); time.sleep(100)"
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(slow)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "omniattn", "info"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | {"PYTHONPATH": path}
    default = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # ignored in jobs
    with subprocess.Popen(command, env=environment, preexec_fn=default, **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and errors == "info: interrupted\n"


def test_schedules_of_pipelines_are_those_of_the_trainer():
    assert tuple(SCHEDULES) == PIPELINE_SCHEDULES
