from pathlib import Path

import pytest

from titan_tune.domain.probe import ProbeSettings
from titan_tune.errors import InputError
from titan_tune.probe.toml import probe_values

SETTINGS = ProbeSettings(steps=20, warmup_steps=5, startup_seconds=1200)
HERE = Path("/runs/study/trials/abc")


def values(job=None, settings=SETTINGS, device="cuda"):
    return probe_values(job or {}, settings, HERE, device)


def test_the_probe_is_short_quiet_and_measured():
    found = values({"training.steps": 5000, "metrics.enable_wandb": True, "checkpoint.enable": True})
    assert found["training.steps"] == 20
    assert found["metrics.log_freq"] == 1
    assert found["metrics.enable_wandb"] is False
    assert found["checkpoint.enable"] is False
    assert found["job.dump_folder"] == "/runs/study/trials/abc/outputs"
    assert found["experimental.custom_import"] == "titan_tune.titan.plugin"
    assert found["job.custom_config_module"] == "titan_tune.titan.plugin.config"


@pytest.mark.parametrize(
    ("job", "total"),
    [
        ({"training.steps": 5000}, 5000),
        ({"training.steps": 5000, "lr_scheduler.total_steps": 7000}, 7000),
        ({}, 10000),
        ({"training.steps": 10}, 20),  # as long as the probe: torchtitan fails beyond its end
        ({"training.steps": 5000, "lr_scheduler.total_steps": 5}, 20),
    ],
)
def test_the_learning_rate_schedule_stays_the_jobs(job, total):
    assert values(job)["lr_scheduler.total_steps"] == total


def test_the_first_step_may_take_as_long_as_start_up_may():
    assert values()["comm.init_timeout_seconds"] == 1200
    assert values({"comm.init_timeout_seconds": 4000})["comm.init_timeout_seconds"] == 4000


def test_the_jobs_own_import_is_kept():
    assert values({"experimental.custom_import": "mine"})["titan_tune.custom_import"] == "mine"
    assert "titan_tune.custom_import" not in values({"experimental.custom_import": "titan_tune.titan.plugin"})
    assert "titan_tune.custom_import" not in values()


def test_the_users_saved_configuration_is_not_written_over():
    assert values({"job.save_config_file": "mine.json"})["job.save_config_file"] is None
    assert "job.save_config_file" not in values()


def test_nothing_that_decides_speed_or_numerics_is_touched():
    kept = (
        "training.seq_len",
        "training.local_batch_size",
        "compile.",
        "parallelism.",
        "optimizer.",
        "debug.deterministic",
    )
    assert not [key for key in values() if key.startswith(kept)]


def test_every_probe_begins_with_the_same_weights_and_a_seed_of_the_users_stays():
    assert values()["debug.seed"] == 0
    assert "debug.seed" not in values({"debug.seed": 7})


@pytest.mark.parametrize(
    ("job", "settings", "device", "names"),
    [
        ({"job.custom_config_module": "mine"}, SETTINGS, "cuda", "job.custom_config_module='mine'"),
        ({}, SETTINGS, "tpu", "device='tpu'"),
        ({}, ProbeSettings(steps=5, warmup_steps=5), "cuda", "warmup_steps=5"),
    ],
)
def test_bad_input_is_one_line_that_names_it(job, settings, device, names):
    with pytest.raises(InputError) as caught:
        values(job, settings, device)
    assert names in str(caught.value)
    assert "\n" not in str(caught.value)
