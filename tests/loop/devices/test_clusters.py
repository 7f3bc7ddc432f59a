"""The files for SLURM and Kubernetes: valid, every worker finds the others, exit codes restart or end the job."""

import json
import os
import pathlib
import re
import shlex
import subprocess

import pytest
import yaml

from keras_vit import UserError
from tests.support import options_of
from training.loop.devices.cluster import slurm_config
from training.loop.devices.strategies import CONTINUE_LATER, StrategyOptions, open_strategy
from training.options.train import PretrainOptions
from training.pretrain import main

CLUSTERS = pathlib.Path(__file__).parents[3] / "docs" / "clusters"
SLURM = CLUSTERS / "slurm.sh"


@pytest.fixture(name="service_and_job")
def _service_and_job() -> list[dict]:
    return list(yaml.safe_load_all((CLUSTERS / "kubernetes.yaml").read_text()))


def environment(container: dict, index: int) -> dict[str, str]:
    """The variables of a pod: $(NAME) is replaced by variables that are defined before."""
    variables: dict[str, str] = {}
    for variable in container["env"]:
        if "valueFrom" in variable:
            path = variable["valueFrom"]["fieldRef"]["fieldPath"]
            assert path == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
            variables[variable["name"]] = str(index)
        else:
            replaced = re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], variable["value"])
            variables[variable["name"]] = replaced
    return variables


def test_every_pod_of_the_job_has_its_place_in_the_cluster(service_and_job, met, monkeypatch):
    service, job = service_and_job
    name, pod = job["metadata"]["name"], job["spec"]["template"]["spec"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["selector"] == {"job-name": name}
    (container,) = pod["containers"]
    count, port = job["spec"]["completions"], container["ports"][0]["containerPort"]
    assert job["spec"]["parallelism"] == count
    assert job["spec"]["completionMode"] == "Indexed"
    addresses = [f"{name}-{index}.{pod['subdomain']}:{port}" for index in range(count)]
    for index in range(count):
        variables = environment(container, index)
        monkeypatch.setenv("TF_CONFIG", variables["TF_CONFIG"])
        open_strategy(StrategyOptions(strategy="multi-worker"))
        assert met[-1][:2] == (addresses, addresses[index])
        assert variables["KERAS_DISTRIBUTION_PROCESS_ID"] == str(index)
        assert variables["KERAS_DISTRIBUTION_NUM_PROCESSES"] == str(count)
        assert variables["KERAS_DISTRIBUTION_JOB_ADDRESSES"] == addresses[0]


def test_the_job_replaces_interrupted_workers_and_ends_at_a_mistake(service_and_job):
    spec = service_and_job[1]["spec"]
    rules = {
        tuple(rule["onExitCodes"]["values"]): rule["action"]
        for rule in spec["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    }
    assert rules == {(CONTINUE_LATER,): "Ignore", (2,): "FailJob"}
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # else Kubernetes refuses the policy


def commands(service_and_job) -> list[list[str]]:
    container = service_and_job[1]["spec"]["template"]["spec"]["containers"][0]
    script = SLURM.read_text().replace("\\\n", " ")
    return [container["command"], shlex.split(next(line for line in script.splitlines() if line.startswith("srun")))]


def test_the_commands_of_the_files_can_be_parsed(service_and_job):
    for command in commands(service_and_job):
        options = options_of(main, command[command.index("training.pretrain") + 1 :])
        assert isinstance(options, PretrainOptions)
        assert options.devices.strategy == "multi-worker"


def test_the_batch_file_of_slurm_is_valid():
    assert subprocess.run(["bash", "-n", SLURM]).returncode == 0
    options = re.findall(r"^#SBATCH --(\S+)", SLURM.read_text(), re.MULTILINE)
    assert {"ntasks-per-node=1", "requeue", "signal=TERM@300"} <= set(options)


@pytest.mark.parametrize(
    ("code", "restarts", "again"),
    [(0, 0, False), (2, 0, False), (CONTINUE_LATER, 0, True), (137, 0, True), (CONTINUE_LATER, 10, False)],
)
def test_slurm_starts_interrupted_workers_again(code, restarts, again, tmp_path):
    for name, text in (("srun", f"exit {code}"), ("scontrol", f'echo "$@" > {tmp_path}/scontrol.txt')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    variables = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts)}
    environ = {**os.environ, **variables, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert subprocess.run(["bash", SLURM], env=environ).returncode == code
    requeued = tmp_path / "scontrol.txt"
    assert (requeued.read_text() if requeued.exists() else "") == ("requeue 7\n" if again else "")


def slurm(monkeypatch, **variables: str) -> None:
    monkeypatch.setenv("TF_CONFIG", "")  # open_strategy sets it
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", value)


def test_every_task_of_a_slurm_job_has_its_place_in_the_cluster(met, monkeypatch):
    for index in range(3):
        step = {"STEP_NODELIST": "node[9-10],big1", "STEP_TASKS_PER_NODE": "1(x3)"}
        slurm(monkeypatch, NTASKS="3", PROCID=str(index), **step)
        open_strategy(StrategyOptions())  # auto
        config = json.loads(os.environ["TF_CONFIG"])
        assert config["cluster"] == {"worker": ["node9:8888", "node10:8888", "big1:8888"]}
        assert config["task"] == {"type": "worker", "index": index}


def test_a_slurm_job_without_srun_is_refused(monkeypatch):
    slurm(monkeypatch, NTASKS="3", PROCID="0")
    with pytest.raises(UserError, match="neither in TF_CONFIG nor .* SLURM job"):
        open_strategy(StrategyOptions())


@pytest.mark.parametrize(
    ("nodes", "tasks", "workers"),
    [
        ("gpu1", "2", ["gpu1:8888", "gpu1:8889"]),
        ("gpu[08-10,12]", "1(x4)", ["gpu08:8888", "gpu09:8888", "gpu10:8888", "gpu12:8888"]),
        ("a-1,b[2-3]", "2(x2),1", ["a-1:8888", "a-1:8889", "b2:8888", "b2:8889", "b3:8888"]),
        ("r[1-2]n[1-2]", "1(x4)", ["r1n1:8888", "r1n2:8888", "r2n1:8888", "r2n2:8888"]),
    ],
)
def test_lists_of_machines_are_expanded_in_the_order_of_the_tasks(nodes, tasks, workers):
    variables = {"SLURM_STEP_NODELIST": nodes, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_PROCID": "1"}
    config = slurm_config(variables)
    assert config == {"cluster": {"worker": workers}, "task": {"type": "worker", "index": 1}}


@pytest.mark.parametrize(
    "wrong", [{"SLURM_PROCID": "2"}, {"SLURM_STEP_TASKS_PER_NODE": "many"}, {"SLURM_STEP_NODELIST": "a,b,c"}]
)
def test_an_environment_that_contradicts_itself_is_refused(wrong):
    variables = {"SLURM_STEP_NODELIST": "a,b", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "0", **wrong}
    with pytest.raises(UserError, match="neither in TF_CONFIG nor .* SLURM job"):
        slurm_config(variables)
