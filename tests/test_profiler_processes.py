"""What one process of several knows of the others; real jobs of two processes are in test_profiler_torchrun.py."""

import os
import subprocess
import sys

import pytest
import torch

from meeting import meeting_point
from pi_toolkit.profiler.processes import Processes, ProcessesError, connected, this_process

CPU = torch.device("cpu")


def test_alone_nothing_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents an ordinary command from asking for torchrun's environment, or from opening sockets."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    alone = this_process()
    counts = torch.arange(3)
    with connected(alone, CPU):
        assert alone.is_first and alone.sum(counts) is counts and alone.first_says(True, CPU)
    assert alone.share([1, 2, 3]) == [1, 2, 3] and alone.local_device("cuda:1") == "cuda:1"


def test_shares_are_disjoint_and_complete() -> None:
    """Prevents a window that no process or that two processes count."""
    items = list(range(11))
    shares = [Processes(rank, 3).share(items) for rank in range(3)]
    assert sorted(item for share in shares for item in share) == items


def test_each_process_gets_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents two processes from filling one GPU while the other is idle."""
    third = Processes(rank=5, count=8, local_rank=2)
    assert (third.local_device("cuda"), third.local_device("cpu")) == ("cuda:2", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert third.local_device("auto") == "cuda:2"
    with pytest.raises(ProcessesError, match="would put 8 processes on one GPU: use --device cuda"):
        third.local_device("cuda:1")


@pytest.mark.parametrize("values", [("0", "2", None), ("2", "2", "0"), ("0", "x", "0"), ("-1", "2", "0")])
def test_an_environment_that_makes_no_sense_is_refused(
    monkeypatch: pytest.MonkeyPatch, values: tuple[str | None, ...]
) -> None:
    """Prevents a share of the windows from being counted by nobody."""
    for name, value in zip(("RANK", "WORLD_SIZE", "LOCAL_RANK"), values, strict=True):
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    with pytest.raises(ProcessesError, match="unset them, or use torchrun"):
        this_process()


def test_processes_that_do_not_meet_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents a traceback where the address of the first process is missing."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ProcessesError, match="cannot be reached"), connected(Processes(0, 2), CPU):
        pass


def test_the_threads_of_a_job_end_with_it() -> None:
    """Prevents an abort at the end of a process whose work is done: a library that is imported during the job keeps the
    group, and a thread of gloo's asks for an interpreter that is gone."""
    program = (
        "import os, torch\nfrom pi_toolkit.profiler.processes import Processes, connected\n"
        "threads = lambda: [open(f'/proc/self/task/{n}/comm').read() for n in os.listdir('/proc/self/task')]\n"
        "gloo = lambda: [name for name in threads() if 'gloo' in name]\n"
        "with connected(Processes(0, 2), torch.device('cpu')):\n"
        "    import transformers.modeling_utils\n"
        "    Processes(0, 2).wait(torch.device('cpu'))\n"
        "    assert gloo()\n"
        "assert not gloo(), gloo()"
    )
    with meeting_point(1) as alone:
        result = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | alone | {"RANK": "0"},
            capture_output=True,
            text=True,
            check=False,
        )
    assert result.returncode == 0, result.stderr


def test_processes_of_two_jobs_do_not_begin() -> None:
    """Prevents counts in two dtypes from being added up, because "auto" depends on each machine's memory."""
    program = (
        "import sys, torch\nfrom pi_toolkit.profiler.processes import ProcessesError, connected, this_process\n"
        "try:\n"
        "    with connected(this_process(), torch.device('cpu'), {'dtype': sys.argv[1]}):\n"
        "        print('began')\n"
        "except ProcessesError as error:\n"
        "    print(error.message)"
    )
    with meeting_point(2) as meeting:
        started = [
            subprocess.Popen(
                [sys.executable, "-c", program, dtype],
                env=os.environ | meeting | {"RANK": rank, "LOCAL_RANK": rank},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, dtype in (("0", "float32"), ("1", "bfloat16"))
        ]
        outputs = [process.communicate(timeout=600)[0] for process in started]
    for said in outputs:
        assert said.startswith(
            "the processes of this job do not have the same model, options or dtype: give every machine"
        )
