"""A real Slurm of two nodes on this machine, of which one loses its power while it runs a scenario."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from command import dtypedoctor
from patience import PATIENCE, becomes
from ports import unused_port

pytestmark = pytest.mark.release

DAEMONS = ("munged", "slurmctld", "slurmd")
FOLDERS = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
NODES = "n1", "n2"
CONFIGURATION = """
ClusterName=tested
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SlurmdTimeout=5
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=all Nodes=n1,n2 Default=YES State=UP
"""


class Slurm:
    """A controller and two nodes; the account of jobs is kept nowhere, so ``sacct`` does not work, as on many clusters."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        ports = [unused_port() for _ in range(3)]
        user, host = os.environ.get("USER", "root"), socket.gethostname().partition(".")[0]
        (folder / "state").mkdir()
        (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder, ports=ports, user=user, host=host))
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": FOLDERS}

    def start(self) -> bool:
        """Starts the daemons; whether the nodes become idle before one of them gives up."""
        key, munge = self.folder / "munge.key", self.folder / "munge.socket"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = [f"--{name}-file={self.folder}/munge.{name}" for name in ("pid", "log", "seed")]
        self._begin("munged", "--foreground", "--force", f"--socket={munge}", f"--key-file={key}", *files)
        becomes(lambda: munge.exists() or self._has_failed())
        self._begin("slurmctld", "-D")
        for node in NODES:
            self._begin("slurmd", "-D", "-N", node)
        becomes(lambda: self._is_idle() or self._has_failed())
        return not self._has_failed()

    def _is_idle(self) -> bool:
        return self.asked("sinfo", "-h", "-N", "-o", "%t").split() == ["idle"] * len(NODES)

    def _has_failed(self) -> bool:
        return any(daemon.poll() is not None for daemon in self._daemons)

    def _begin(self, *command: str) -> None:
        with (self.folder / f"{command[0]}.out").open("ab") as log:
            self._daemons.append(subprocess.Popen(command, env=self.environment, stdout=log, stderr=log))

    def asked(self, *command: str) -> str:
        """What a command of Slurm prints."""
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False).stdout

    def cut_the_power(self, node: str) -> None:
        """Nothing of the node and of what it runs does anything any more, all at once."""
        mine = [process for process in psutil.process_iter() if self._runs_on(process, node)]
        steps = [parent for process in mine if (parent := process.parent()) and parent.name() == "slurmstepd"]
        daemon = psutil.Process(self._daemons[NODES.index(node) - len(NODES)].pid)
        for blow in (signal.SIGSTOP, signal.SIGKILL):
            for process in {daemon, *mine, *steps}:
                process.send_signal(blow)

    def _runs_on(self, process: psutil.Process, node: str) -> bool:
        """Whether a process belongs to a job on a node of this cluster."""
        try:
            values = process.environ()
        except psutil.Error:
            return False
        return values.get("SLURM_CONF") == self.environment["SLURM_CONF"] and values.get("SLURMD_NODENAME") == node

    def stop(self) -> None:
        """Ends jobs and daemons."""
        self.asked("scancel", "--user", str(os.getuid()))
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            daemon.wait(PATIENCE)


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    """A cluster that runs."""
    pytest.importorskip("submitit", reason="needs the extra dtypedoctor[slurm]")
    missing = [name for name in DAEMONS if shutil.which(name, path=FOLDERS) is None]
    if missing:
        pytest.skip(f"Slurm is not installed (Debian: slurm-wlm): there is no {', '.join(missing)}")
    folder = tmp_path / "slurm"
    folder.mkdir()
    cluster = Slurm(folder)
    try:
        if not cluster.start():
            pytest.skip(f"Slurm does not start here: {(folder / 'slurmctld.log').read_text()[-500:]}")
        yield cluster
    finally:
        cluster.stop()


NETWORK = """
import os, time
from dtypedoctor.lab.models.builtin import llama_tiny

def make():
    if os.environ["SLURMD_NODENAME"] == "n2":
        open({begun!r}, "w").close()
        time.sleep({patience})
    return llama_tiny()
"""


def test_a_scenario_runs_elsewhere_when_its_node_loses_power(slurm: Slurm, tmp_path: Path) -> None:
    """No result tells that a machine is lost, and no accounts; Slurm starts nothing again by itself, so no job is left in the queue."""
    begun = tmp_path / "begun"
    (tmp_path / "network.py").write_text(NETWORK.format(begun=str(begun), patience=PATIENCE))
    (tmp_path / "scenarios").mkdir()
    for name in ("first", "second"):
        scenario = {
            "name": name,
            "summary": "A model of one's own.",
            "device": "cpu",
            "steps": [{"model": {"name": "network:make"}, "workload": {"kind": "forward"}}],
        }
        (tmp_path / "scenarios" / f"{name}.yaml").write_text(json.dumps(scenario))
    options = ("--executor", "slurm", "--jobs", "2", "--out", "out", "--no-remedies")
    running = subprocess.Popen(
        [sys.executable, "-m", "dtypedoctor", "run", "scenarios", *options],
        cwd=tmp_path, env=slurm.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        becomes(lambda: begun.exists() or running.poll() is not None)
        slurm.cut_the_power("n2")
        out, err = running.communicate(timeout=PATIENCE)
    finally:
        running.kill()
    assert running.returncode == 0, err
    assert err.count("is over and has left no result); submitted again") == 1
    assert "sacct" not in err
    assert "2 of 2 scenarios as expected" in out
    assert slurm.asked("squeue", "-h") == ""


TRAINING = """
import os
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo", init_method="file://{folder}/meeting", world_size=2, rank=int(os.environ.get("RANK", os.environ["SLURM_PROCID"])))
model = nn.parallel.DistributedDataParallel(nn.Linear(16, 16).half())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(3):
    scale = 3e4 if dist.get_rank() == 1 and step == 1 else 1.0
    loss = model(torch.ones(4, 16).half() * scale * 3).float().square().mean()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("launcher", ["srun", "srun torchrun"])
def test_processes_that_srun_starts_are_the_ranks_of_one_report(slurm: Slurm, tmp_path: Path, launcher: str) -> None:
    """Slurm's variables number them; under torchrun they number the machines, and torchrun's own the ranks."""
    (tmp_path / "train.py").write_text(TRAINING.format(folder=tmp_path))
    torchrun = f"torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{unused_port()} --rdzv-id 7"
    slurm.asked(
        "srun", "-N2", "-n2", "--chdir", str(tmp_path), sys.executable, "-m", "dtypedoctor", "exec", "--out", "job",
        *(torchrun.split() if "torchrun" in launcher else ()), "train.py",
    )  # fmt: skip
    found = dtypedoctor("report", "job", "--format", "json", cwd=tmp_path)
    [first, *_] = json.loads(found.out)["findings"]
    assert (first["id"], first["rank"], first["source"]) == ("float16-overflow", 1, "train.py:12")
