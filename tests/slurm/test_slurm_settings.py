"""The ``[slurm]`` table."""

import pytest
from pydantic import ValidationError

from titan_tune.probe.slurm.settings import SlurmSettings, slurm_minutes


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("90", 90),
        ("90:30", 91),
        ("1:30:00", 90),
        ("1-12", 2160),
        ("1-12:30", 2190),
        ("1-0:0:1", 1441),
        ("0:30", 1),
    ],
)
def test_slurms_times(text, minutes):
    assert slurm_minutes(text) == minutes
    assert SlurmSettings(time=text).time_minutes == minutes


def test_a_time_may_be_a_number_of_minutes():
    assert SlurmSettings.model_validate({"time": 45}, strict=True).time_minutes == 45
    assert SlurmSettings().time_minutes is None


def test_a_whole_table_as_toml_gives_it():
    table = {
        "partition": "h100",
        "exclude": ["node7", "node[1-3,9]"],
        "setup": ["module load cuda"],
        "extra_sbatch_lines": ["#SBATCH --comment=x", "-L lic"],
        "container": {"runtime": "pyxis", "image": "a#b", "mounts": ["/a:/a"]},
        "pending_deadline_seconds": 60,
    }
    settings = SlurmSettings.model_validate(table, strict=True)
    assert settings.exclude == ("node7", "node[1-3,9]")
    assert settings.extra_sbatch_lines == ("--comment=x", "-L lic")
    assert settings.container.mounts == ("/a:/a",)


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"partition": "a\n#SBATCH --wrap=x"}, "one line"),
        ({"account": ""}, "empty"),
        ({"setup": ["a\nb"]}, "one line"),
        ({"setup": "module load"}, "tuple"),
        ({"exclude": ["a b"]}, "node names"),
        ({"exclude": ["--x"]}, "node names"),
        ({"time": "soon"}, "Slurm time"),
        ({"time": "0"}, "at least a minute"),
        ({"time": True}, "string"),
        ({"time": -5}, "Slurm time"),
        ({"extra_sbatch_lines": ["comment"]}, "sbatch option"),
        ({"extra_sbatch_lines": ["--requeue"]}, "sets --requeue itself"),
        ({"extra_sbatch_lines": ["#SBATCH -Jx"]}, "sets -J itself"),
        ({"extra_sbatch_lines": ["--comment=x\n#SBATCH --requeue"]}, "one line"),
        ({"extra_sbatch_lines": ["--array=1-5"]}, "sets --array itself"),
        ({"gpus": "gpu"}, "gpus-per-node"),
        ({"cpus_per_task": 0}, "greater than 0"),
        ({"container": {"runtime": "docker", "image": "x"}}, "pyxis"),
        ({"container": {"runtime": "pyxis"}}, "required"),
        ({"partitions": "x"}, "Extra inputs"),
        ({"pending_deadline_seconds": 0}, "greater than 0"),
    ],
)
def test_what_is_refused(table, says):
    with pytest.raises(ValidationError, match=says):
        SlurmSettings.model_validate(table, strict=True)
