"""Mistakes on the command line of `hpctrain submit`, what Kubernetes would get, and what schedulers' answers mean."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hpctrain_tools.runs.standing import described
from hpctrain_tools.submit.record import cancelled
from jobs import TINY, JobFile
from pydantic import ValidationError
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import hpctrain
from hpctrain.base.errors import UsageError
from hpctrain.cli import execute
from hpctrain.contracts.scheduler import JobState, Launch, Scheduler, SubmittedRun
from hpctrain.job.raw import RawJob
from hpctrain.ranks.detection import detect
from hpctrain.ranks.rank_channel import RankChannel
from hpctrain.registry.registry import build_registry
from hpctrain.registry.user_code.python_objects import given_objects
from hpctrain.training.rank import run_rank

MISTAKES = {
    "no target": ([], 2, "the job has no table such as [scheduler.slurm]; say where to submit it, for instance --to slurm"),
    "an unknown target": (["--to", "slrm"], 2, "no installed plugin provides the scheduler 'slrm'; did you mean 'slurm'?"),
    "an unknown key": (["--set", "scheduler.slurm.qeue=x"], 2, "unknown key 'qeue' in [scheduler] slurm"),
    "a line of two": (["--to", "slurm", "--set", 'scheduler.slurm.qos="a\\nb"'], 2, "expected one line of printable text"),
    "a time of no unit": (["--to", "slurm", "--time", "60x"], 2, "--time 60x: [scheduler] slurm.time: expected a time such as"),
    "no time to train": (["--to", "slurm", "--time", "2m"], 2, "expected time > save_seconds, found time = 2m"),
    "ranks that do not fit": (["--to", "slurm", "--nodes", "5"], 2, "12 does not divide over 5 data-parallel ranks"),
    "a key of the job": (["--to", "slurm", "--set", "optimizer.lr=fast"], 2, "[optimizer] lr: expected a valid number"),
    "one value": (["--to", "slurm", "--array", "job.seed=1"], 2, "found one value, expected two or more"),
    "a value twice": (["--to", "slurm", "--array", "job.seed=1,1"], 2, "found two runs named job.seed=1"),
    "no values": (["--to", "slurm", "--array", "job.seed"], 2, "expected KEY=V1,V2,..."),
    "nodes as values": (["--to", "slurm", "--array", "scheduler.slurm.nodes=1,2"], 2, "expected a key of the training"),
    "a wrong value": (["--to", "slurm", "--array", "optimizer.lr=0.1,fast"], 2, "--set optimizer.lr=fast: [optimizer] lr"),
    "after no run": (["--to", "slurm", "--after", "./nowhere"], 2, "nowhere: found no directory, expected the directory of a run"),
    "no sbatch": (["--to", "slurm"], 3, "found no command sbatch on this machine"),
    "no kubectl": (["--to", "kubernetes", *("--set", "scheduler.kubernetes={image='i', claim='c'}")], 3, "no command kubectl"),
    "no image": (["--to", "kubernetes", "--set", "scheduler.kubernetes.claim=c"], 2, "kubernetes lacks the key 'image'"),
    "an unknown key of a row": (
        ["--to", "kubernetes", "--set", "scheduler.kubernetes={image='i', claim='c', tolerations=[{kee='x'}]}"], 2,
        "unknown key 'kee' in [scheduler] kubernetes.tolerations; did you mean 'key'?",
    ),
    "outside of the claim": (
        ["--to", "kubernetes", "--set", "scheduler.kubernetes={image='i', claim='c'}", "--set", "job.output_dir=/tmp/x"], 2,
        "found /tmp/x, expected a path in the volume claim, relative or below /work",
    ),
    "kubernetes with --after": (
        ["--to", "kubernetes", "--set", "scheduler.kubernetes={image='i', claim='c'}", "--after", "17"], 2,
        "Kubernetes starts no job after another one",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_sentence(
    job: JobFile, mistake: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, expected, sentence = MISTAKES[mistake]
    monkeypatch.chdir(job.directory)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))  # without the commands of any scheduler
    monkeypatch.setattr(sys, "argv", ["hpctrain", "submit", "job.toml", *words])
    code = execute()
    told = capsys.readouterr()
    assert (code, told.out) == (expected, "") and sentence in told.err, told
    assert "Traceback" not in told.err and told.err.count("\n") == 1, told


def scheduler(name: str, **options: Any) -> Scheduler:
    registry = build_registry()
    cls = registry.find("scheduler", name).cls
    made: Scheduler = registry.make(cls, cls.Options(**options))
    return made


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """Two nodes of four ranks for an hour."""
    text = '[job]\nname = "Tiny.Run"\noutput_dir = "runs/tiny"\n# a line: with "quotes" \'and\' ${more}\n'
    return Launch(
        name="Tiny.Run", directory=tmp_path, runs=(SubmittedRun(tmp_path, tmp_path / "job.toml", text),),
        working_directory=tmp_path, nodes=2, ranks_per_node=4, cpus_per_rank=8, seconds=3600, save_seconds=120,
        program=("hpctrain",), mpi="MPICH",
    )  # fmt: skip


def test_srun_gets_the_cores_of_a_rank_where_a_job_asks_for_them(launch: Launch) -> None:
    """Since Slurm 22.05 a step does not take them over from the batch script by itself."""
    script = scheduler("slurm").render(launch)
    assert "#SBATCH --cpus-per-task=8\n" in script and ' --cpus-per-task="$SLURM_CPUS_PER_TASK"' in script, script
    assert "cpus" not in scheduler("slurm").render(replace(launch, cpus_per_rank=None)).lower()


@pytest.mark.parametrize(
    ("name", "gpus"), [("slurm", {"gres": "gpu:4"}), ("pbs", {"gpus_per_rank": 1}), ("flux", {"gpus_per_rank": 1})]
)
def test_a_container_gets_the_gpus_of_its_node(name: str, gpus: dict[str, Any], launch: Launch) -> None:
    script = scheduler(name, container="my images/a.sif", **gpus).render(launch)
    (line,) = [line for line in script.splitlines() if "apptainer exec" in line]
    shown = f"apptainer() {{ printf '%s\\n' \"$@\"; }}; {line[line.index('apptainer') :].partition(' run ')[0]}"
    done = subprocess.run(["bash", "-c", shown], capture_output=True, text=True, timeout=30, check=True)
    option = "--rocm" if Path("/dev/kfd").exists() else "--nv"
    assert done.stdout.splitlines() == ["exec", option, "my images/a.sif", "hpctrain"], line


KUBERNETES = {"image": "registry/hpctrain:1", "claim": "runs", "claim_size": "500Gi", "memory": "64Gi", "gpus_per_rank": 1,
              "namespace": "team", "secrets": ["wandb"]}  # fmt: skip


def manifests(launch: Launch, **options: Any) -> dict[str, Any]:
    """The documents by their kind."""
    documents = list(yaml.safe_load_all(scheduler("kubernetes", **(KUBERNETES | options)).render(launch)))
    assert len({one["kind"] for one in documents}) == len(documents)
    for one in documents:
        assert one["metadata"]["namespace"] == "team"
    return {one["kind"]: one for one in documents}


def refuse_unknown(model: str, document: Any) -> None:
    """Fail unless `document` is one of the published model of kubernetes, key by key."""
    from kubernetes import client

    api = client.ApiClient()
    read = api.deserialize(json.dumps(document), model, "application/json")
    assert api.sanitize_for_serialization(read) == document, "the model has no such keys"


def pods(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The specs of all pods."""
    if "TrainingRuntime" in found:
        jobs = found["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
        return [one["template"]["spec"]["template"]["spec"] for one in jobs]
    if "MPIJob" in found:
        return [one["template"]["spec"] for one in found["MPIJob"]["spec"]["mpiReplicaSpecs"].values()]
    return [found["Job"]["spec"]["template"]["spec"]]


def restricted(pod: dict[str, Any]) -> list[str]:
    """Objections of the Pod Security Standard "restricted", and of "baseline" below it, to a pod."""
    own, volumes = pod.get("securityContext", {}), {key for one in pod["volumes"] for key in one.keys() - {"name"}}
    allowed = {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
    found = [f"the volume {one}" for one in volumes - allowed]
    found += [key for key in ("hostNetwork", "hostPID", "hostIPC", "hostUsers") if pod.get(key)]
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        context = {**own, **container.get("securityContext", {})}
        capabilities = context.get("capabilities", {})
        found += [f"a host's port {one}" for one in container.get("ports", []) if "hostPort" in one]
        found += ["privileged"] if context.get("privileged") else []
        found += [] if context.get("allowPrivilegeEscalation") is False else ["allowPrivilegeEscalation"]
        found += [] if context.get("runAsNonRoot") is True and context.get("runAsUser") != 0 else ["root"]
        found += [] if "ALL" in capabilities.get("drop", []) else ["capabilities"]
        found += [f"capability {one}" for one in capabilities.get("add", []) if one != "NET_BIND_SERVICE"]
        found += [] if context.get("seccompProfile", {}).get("type") in ("RuntimeDefault", "Localhost") else ["seccomp"]
        found += [] if context.get("procMount", "Default") == "Default" and not context.get("sysctls") else ["proc"]
    return found


KINDS = ["TrainJob", "MPIJob", "Job"]
MORE = {
    "queue": "team-queue", "user": 4711, "pull_secrets": ["registry"], "node_selector": {"gpu": "H100"}, "secrets": [],
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule", "tolerationSeconds": 60}],
    "extra": {
        "metadata": {"labels": {"project": "lm"}, "annotations": {"a": "b"}},
        "pod": {"priorityClassName": "batch", "volumes": [{"name": "own", "emptyDir": {}}]},
        "container": {
            "command": ["own"], "imagePullPolicy": "Always", "volumeMounts": [{"name": "own", "mountPath": "/own"}],
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_pods_are_restricted_and_request_resources(launch: Launch, kind: str) -> None:
    plain = replace(launch, cpus_per_rank=None)
    for pod in pods(manifests(plain, kind=kind, secrets=[], memory=None, gpus_per_rank=0)):
        refuse_unknown("V1PodSpec", pod)
        assert restricted(pod) == [] and pod["securityContext"]["runAsUser"] == 1000
        (container,) = pod["containers"]
        ranks = {"launcher": 0, "rank": 1}.get(container["name"], 4)
        wanted = {"cpu": f"{500 * ranks}m", "memory": f"{ranks}Gi"} if ranks else {"cpu": "1", "memory": "1Gi"}
        assert container["resources"]["requests"] == wanted
        assert ("limits" in container["resources"]) is (ranks == 0), "a guess must not end a rank"
    for pod in pods(manifests(launch, kind=kind, secrets=[])):
        resources = pod["containers"][0]["resources"]
        assert resources["limits"] == resources["requests"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_site_asks_of_pods(launch: Launch, kind: str) -> None:
    found = manifests(launch, kind=kind, **MORE)
    job = found[kind]["metadata"]
    assert job["labels"]["kueue.x-k8s.io/queue-name"] == "team-queue" and job["annotations"] == {"a": "b"}
    assert job["labels"].keys() >= {"app.kubernetes.io/managed-by", "project"}
    refuse_unknown("V1ObjectMeta", job)
    for pod in pods(found):
        refuse_unknown("V1PodSpec", pod)
        assert restricted(pod) == []
        context = pod["securityContext"]
        assert [context[key] for key in ("runAsUser", "runAsGroup", "fsGroup")] == [4711] * 3
        assert pod["tolerations"] == MORE["tolerations"] and pod["nodeSelector"] == {"gpu": "H100"}
        assert pod["imagePullSecrets"] == [{"name": "registry"}] and pod["priorityClassName"] == "batch"
        (container,) = pod["containers"]
        assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]} > {"own"}
        assert container["command"] == ["own"] and container["imagePullPolicy"] == "Always"
        assert (kind != "Job") or {"RANK", "WORLD_SIZE"} <= {one["name"] for one in container["env"]}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"user": 0}, "greater than or equal to 1"),
        ({"tolerations": [{"key": "a", "effekt": "NoSchedule"}]}, "effekt"),
        ({"tolerations": [{"operator": "In"}]}, "'Exists' or 'Equal'"),
        ({"extra": {"pods": {}}}, "pods"),
    ],
)
def test_wrong_values_for_pods(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        scheduler("kubernetes", **KUBERNETES, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_variables_of_containers_that_ranks_would_not_get(launch: Launch, kind: str) -> None:
    extra = {"container": {"env": [{"name": "HF_HOME", "value": "/scratch/hf"}]}}
    if kind == "Job":
        (pod,) = pods(manifests(launch, kind=kind, extra=extra))
        assert pod["containers"][0]["env"][-1] == {"name": "HF_HOME", "value": "/scratch/hf"}
    else:
        with pytest.raises(UsageError, match=rf"found env, but the ranks of a {kind} start over ssh.* \[environment\]"):
            manifests(launch, kind=kind, secrets=[], extra=extra)


def test_what_every_kind_gets(launch: Launch) -> None:
    found = manifests(launch)
    refuse_unknown("V1PersistentVolumeClaim", found["PersistentVolumeClaim"])
    refuse_unknown("V1ConfigMap", found["ConfigMap"])
    assert found["ConfigMap"]["data"]["job.toml"] == launch.runs[0].text
    assert found["PersistentVolumeClaim"]["metadata"]["name"] == "runs"


def test_a_train_job_with_the_mpi_policy(launch: Launch) -> None:
    from kubeflow_trainer_api import models

    found = manifests(launch)
    for kind, model in (
        ("TrainJob", models.TrainerV1alpha1TrainJob),
        ("TrainingRuntime", models.TrainerV1alpha1TrainingRuntime),
    ):
        read = model.from_dict(found[kind])
        assert read is not None and read.to_dict() == found[kind], "the model has no such keys"
    job, runtime = found["TrainJob"], found["TrainingRuntime"]
    assert job["spec"]["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": runtime["metadata"]["name"],
    }  # fmt: skip
    assert runtime["spec"]["mlPolicy"]["mpi"]["numProcPerNode"] == 4 and job["spec"]["trainer"]["numNodes"] == 2
    hpctrain = ["hpctrain", "run", "/etc/hpctrain/job.toml"]
    assert job["spec"]["trainer"]["command"][-6:] == ["/etc/mpi/hostfile", "-n", "8", *hpctrain]
    for replicated in runtime["spec"]["template"]["spec"]["replicatedJobs"]:
        check_pod(replicated["template"]["spec"]["template"]["spec"], gpus=4)


def test_an_mpi_job(launch: Launch) -> None:
    with pytest.raises(UsageError, match="ssh, which passes no variables on"):
        manifests(launch, kind="MPIJob")
    spec = manifests(launch, kind="MPIJob", secrets=[])["MPIJob"]["spec"]
    roles = spec["mpiReplicaSpecs"]
    assert {role: one["replicas"] for role, one in roles.items()} == {"Launcher": 1, "Worker": 2}
    assert spec["slotsPerWorker"] == 4 and spec["runPolicy"]["activeDeadlineSeconds"] == 3600
    for role, gpus in (("Launcher", 0), ("Worker", 4)):
        refuse_unknown("V1PodTemplateSpec", roles[role]["template"])
        check_pod(roles[role]["template"]["spec"], gpus, secret=False)


def test_mpirun_gets_its_variables_of_the_job(launch: Launch) -> None:
    given = replace(launch, environment={"PRTE_MCA_a": "x $(HOSTNAME)"})
    words = manifests(given)["TrainJob"]["spec"]["trainer"]["command"]
    assert words[:3] == ["env", "PRTE_MCA_a=x $$(HOSTNAME)", "mpirun"]
    assert "env" not in manifests(launch)["TrainJob"]["spec"]["trainer"]["command"]


def test_an_indexed_job(launch: Launch) -> None:
    found = manifests(launch, kind="Job")
    refuse_unknown("V1Job", found["Job"])
    refuse_unknown("V1Service", found["Service"])
    spec = found["Job"]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (8, 8, "Indexed")
    check_pod(spec["template"]["spec"], gpus=1)
    name = found["Job"]["metadata"]["name"]
    assert found["Service"]["metadata"]["name"] == spec["template"]["spec"]["subdomain"] == name
    assert found["Service"]["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    assert len(f"{name}-7") <= 63 and name == name.lower() and "." not in name


def check_pod(pod: dict[str, Any], gpus: int, *, secret: bool = True) -> None:
    """The volumes that a container mounts are there; resources are those of its ranks."""
    (container,) = pod["containers"]
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    claims = [one["persistentVolumeClaim"]["claimName"] for one in pod["volumes"] if "persistentVolumeClaim" in one]
    assert claims == ["runs"] and pod["terminationGracePeriodSeconds"] == 120
    assert container.get("envFrom") == ([{"secretRef": {"name": "wandb"}}] if secret else None)
    if gpus:
        assert container["resources"]["limits"] == {"cpu": str(8 * gpus), "memory": "64Gi", "nvidia.com/gpu": str(gpus)}


ANSWERS = {
    "pbs": ("qstat", [
        ('{"Jobs": {"12.s": {"job_state": "Q", "comment": "Not Running: not enough free nodes"}}}',
         JobState("pending", "(Not Running: not enough free nodes)")),
        ('{"Jobs": {"12.s": {"job_state": "R", "exec_host": "n1/0*4+n2/0*4"}}}', JobState("running", "on n1/0*4+n2/0*4")),
        ('{"Jobs": {"12.s": {"job_state": "F", "Exit_status": 0}}}', JobState("done")),
        ('{"Jobs": {"12.s": {"job_state": "F", "Exit_status": 4}}}', JobState("failed", "(exit status 4)")),
        ('{"Jobs": {"12.s": {"job_state": "F", "Exit_status": 271}}}', JobState("cancelled", "(exit status 271)")),
        ('{"Jobs": {"12.s": {"job_state": "F", "Exit_status": 143}}}', JobState("cancelled", "(exit status 143)")),
        ('{"Jobs": {"12.s": {"job_state": "F"}}}', JobState("cancelled", "before it began")),
        ("", JobState("unknown", "PBS has forgotten the job")),
    ]),
    "flux": ("flux", [
        ("SCHED|-|", JobState("pending", "(SCHED)")),
        ("RUN|-|n[1-2]", JobState("running", "on n[1-2]")),
        ("COMPLETED|0|n1", JobState("done")),
        ("FAILED|4|n1", JobState("failed", "(FAILED, exit code 4)")),
        ("TIMEOUT|142|n1", JobState("failed", "(TIMEOUT, exit code 142)")),
        ("CANCELED|-128|", JobState("cancelled")),
    ]),
    "kubernetes": ("kubectl", [
        ('{"status": {}}', JobState("pending")),
        ('{"status": {}, "items": [{"status": {"conditions": [{"type": "PodScheduled", "status": "False", '
         '"reason": "Unschedulable", "message": "0/3 nodes are available:\\n3 Insufficient memory."}]}}]}',
         JobState("pending", "(Unschedulable: 0/3 nodes are available: 3 Insufficient memory.)")),
        ('{"status": {"active": 2, "ready": 2}}', JobState("running")),
        ('{"status": {"jobsStatus": [{"name": "node", "ready": 1}]}}', JobState("running")),
        ('{"status": {"conditions": [{"type": "Running", "status": "True"}]}}', JobState("running")),
        ('{"status": {"conditions": [{"type": "Running", "status": "False"}, {"type": "Succeeded", "status": "True"}]}}',
         JobState("done")),
        ('{"status": {"conditions": [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}]}}',
         JobState("failed", "(DeadlineExceeded)")),
        ("", JobState("unknown", "Kubernetes has no such job any more")),
    ]),
}  # fmt: skip
"""Of schedulers that are not here: what their commands print, as documented, and what it means."""


@pytest.mark.parametrize("name", ANSWERS)
def test_the_answers_of_a_scheduler(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command, answers = ANSWERS[name]
    options = {"image": "i", "claim": "c"} if name == "kubernetes" else {}
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / command).write_text(f"#!/bin/sh\ncat {tmp_path}/answer\n")
    (tmp_path / command).chmod(0o755)
    for said, meant in answers:
        (tmp_path / "answer").write_text(said)
        assert scheduler(name, **options).state("jobs.batch/a" if name == "kubernetes" else "12") == meant


@pytest.mark.parametrize(
    "id", ["namespace/prod", "persistentvolumeclaim/work", "jobs.batch/a/b", "jobs.batch/--all", "12"]
)
def test_kubernetes_touches_jobs_only(id: str) -> None:
    target = scheduler("kubernetes", image="i", claim="c")
    for asks in (target.state, lambda id: target.cancel(id, Path("run"))):
        with pytest.raises(UsageError, match="found the id"):
            asks(id)


HOLDS = """
from pathlib import Path
from hpctrain.job.output_lock import OutputLock

lock = OutputLock()
lock.take(Path("out"))
print("taken", flush=True)
input()
"""


def test_a_refused_cancel_leaves_the_mark_of_an_earlier_one(tmp_path: Path) -> None:
    mark = tmp_path / "cancelled"
    with pytest.raises(UsageError, match="refused"), cancelled(tmp_path):
        assert mark.exists()
        raise UsageError("refused")
    assert not mark.exists()
    mark.touch()
    os.utime(mark, ns=(5, 5))
    with pytest.raises(UsageError, match="refused"), cancelled(tmp_path):
        assert mark.stat().st_mtime_ns > 5
        raise UsageError("refused")
    assert mark.stat().st_mtime_ns == 5
    with cancelled(tmp_path):
        pass
    assert mark.stat().st_mtime_ns > 5


def test_a_mark_that_cannot_be_made_is_told_and_the_job_ends_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cancelled").mkdir()
    told = []
    with cancelled(tmp_path):
        told.append("the scheduler")
    assert told and f"warning: {tmp_path / 'cancelled'} cannot be made" in capsys.readouterr().err


@pytest.mark.parametrize(("again", "code"), [(False, 75), (True, 143)])
def test_only_a_mark_since_the_start_says_that_a_job_was_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool, code: int
) -> None:
    """As after `scontrol requeue` of a job that was cancelled once."""
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    with cancelled(out):
        pass
    os.utime(out / "cancelled", ns=(5, 5))

    def loss(outputs: Tensor, target: Tensor) -> Tensor:
        if again:
            with cancelled(out):
                pass
        signal.raise_signal(signal.SIGTERM)
        return mse_loss(outputs, target)

    tables = {
        "job": {"name": "again", "steps": 3, "output_dir": "out"}, "batch": {"global_size": 4, "micro_size": 4},
        "model": {"name": lambda: torch.nn.Linear(1, 1), "loss": loss}, "optimizer": {"name": "adamw", "lr": 0.1},
        "dataset": {"name": TensorDataset(torch.ones(8, 1), torch.ones(8, 1))},
    }  # fmt: skip
    with given_objects(tables) as plain:
        raw = RawJob(plain, {}, str(out / "job.submitted.toml"))
        assert run_rank(detect(), lambda: raw, "auto", RankChannel())["exit_code"] == code


def no_locks(*_: Any) -> None:
    """As fcntl.lockf on a file system without them."""
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_the_status_of_a_run_that_nobody_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert described(Path("out")) is None
    job = {**TINY, "checkpoint": {"every_steps": 3}}
    loss = hpctrain.run(job)["loss"]
    newest = Path("out/checkpoints/step-00000004")
    done = f"done, step 4 of 4, loss {loss:.4f}, newest checkpoint {newest}"
    assert described(Path("out")) == done
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "taken\n"
        found = described(Path("out")) or ""
        assert found.startswith(f"running (process {holder.pid} on ") and found.endswith(done.removeprefix("done"))
    finally:
        holder.communicate("\n", timeout=60)
    assert described(Path("out")) == done
    resolved = Path("out/job.resolved.toml")
    resolved.write_text(resolved.read_text().replace("steps = 4", "epochs = 1"))  # 500 samples, 12 a step
    log = Path("out/log/rank-00000.log")
    begun, _, ended = log.read_text().partition(" INFO done ")
    stopped = "stopped at step 4 of 41"
    for end, word in (
        ("", "failed"),
        (f" INFO {stopped}\n", "stopped"),
        (f" INFO {stopped}, as it was cancelled\n", "cancelled"),
        (f" INFO done {ended}", "done"),
    ):
        log.write_text(begun + end)
        assert described(Path("out")) == done.replace("done", word).replace("4 of 4", "4, epoch 0.10 of 1")
    log.write_text(begun)
    resolved.write_text(resolved.read_text().replace("epochs = 1", "epochs = 0.1"))
    trained = "step 4, epoch 0.10 of 0.1"
    assert (described(Path("out")) or "").startswith(f"failed, {trained}")  # in its last evaluation or save
    log.unlink()
    assert (described(Path("out")) or "").startswith(f"done, {trained}")
    log.write_text(begun)
    resolved.write_text(resolved.read_text().replace("epochs = 0.1", "epochs = 1"))
    lock = Path("out/lock")
    with monkeypatch.context() as patched:  # what only tells where no lock does: whether it has written within a minute
        patched.setattr(fcntl, "lockf", no_locks)
        assert re.match(r"running \(wrote \d+ s ago\), step 4", described(Path("out")) or "")
        for path in (log, resolved, Path("out/metrics.jsonl")):
            os.utime(path, (time.time() - 100, time.time() - 100))
        expected = "unknown (running or stopped: its lock cannot tell: No locks available), step 4"
        assert (described(Path("out")) or "").startswith(expected)
    lock.write_text("process 12 on another-node\n")  # whose locks may not be seen here
    assert (described(Path("out")) or "").startswith("failed, step 4")
    os.utime(log)
    assert (described(Path("out")) or "").startswith("running (wrote ")
    log.unlink()
    metrics = Path("out/metrics.jsonl")
    metrics.write_text(f'{{"step": {"9" * 400}, "epoch": 1.0}}\n')
    assert described(Path("out")) == f"stopped, before its first step, newest checkpoint {newest}"
    metrics.write_text('{"step": 4, "epoch": 0.5}\n')
    resolved.write_text(resolved.read_text().replace("epochs = 1", f"epochs = {'9' * 400}"))
    assert described(Path("out")) == f"stopped, step 4, newest checkpoint {newest}"
    resolved.write_text("[job")
    Path("out/metrics.jsonl").write_text('{"step": "\x1b"}\n[1]\n')
    assert described(Path("out")) == f"stopped, before its first step, newest checkpoint {newest}"
