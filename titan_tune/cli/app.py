"""The typer application: every command's arguments, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

import titan_tune
from titan_tune.cli import DEBUG_FLAG, fail
from titan_tune.cli.storage import VARIABLE, concealed
from titan_tune.errors import InputError, InterruptedSearchError

app = typer.Typer(
    name="titan-tune",
    help="Find the fastest torchtitan configuration that fits and trains soundly.",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _positive(hours: float | None) -> float | None:
    """A number of hours; typer's own bounds include their ends."""
    if hours is not None and not 0 < hours < float("inf"):
        raise typer.BadParameter(f"{hours:g} is not a number above 0")
    return hours


Gpus = Annotated[int | None, typer.Option("--gpus", min=1, help="GPUs of the job (one node up to 8).")]
Nodes = Annotated[int | None, typer.Option("--nodes", min=1, help="Nodes of the job.")]
GpusPerNode = Annotated[int | None, typer.Option("--gpus-per-node", min=1, help="GPUs of each node.")]
Gpu = Annotated[
    str | None, typer.Option("--gpu", help="GPU from the catalogue, e.g. h100-80gb; default: this machine's.")
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any dotted torchtitan key; repeatable."),
]
HfConfig = Annotated[
    Path | None, typer.Option("--hf-config", help="Hugging Face config.json that defines the model.")
]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable on stdout, everything else on stderr.")]
Runs = Annotated[Path, typer.Option("--runs-dir", help="Folder that holds a folder for each study.")]
Storage = Annotated[
    str | None,
    typer.Option(
        "--storage",
        envvar=VARIABLE,
        help="Where the study is kept: a .journal or .log file (journal:///…) on a file system that hosts share, or a"
        " database (postgresql://…). Several searches may share it. Default: runs/<study>/study.db, for one.",
    ),
]


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[
        bool,
        typer.Option(DEBUG_FLAG, help="Show the traceback of an error; before or after the command's name."),
    ] = False,
) -> None:
    """Find the fastest torchtitan configuration that fits and trains soundly."""
    del debug  # for the help: ``cli.run`` takes it off the command line
    if version:
        typer.echo(f"titan-tune {titan_tune.__version__}")
        raise typer.Exit(0)
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help(), err=True)
        raise typer.Exit(InputError.exit_code)


@app.command()
def estimate(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="torchtitan 0.2.x TOML.")],
    gpus: Gpus = None,
    nodes: Nodes = None,
    gpus_per_node: GpusPerNode = None,
    gpu: Gpu = None,
    sets: Sets = None,
    hf_config: HfConfig = None,
    sweep: Annotated[
        str | None, typer.Option(metavar="KEY=V1,V2,…", help="A table over one key's values.")
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            help="formula (at once), trace (a minute, many with pipelines; exact) or dry-run (one rank on a GPU)."
        ),
    ] = "formula",
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page as well.")] = None,
    accounting: Annotated[
        bool,
        typer.Option("--accounting", help="The static table people quote, beside what torchtitan holds."),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="--html may replace a file that is not such a page.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Peak memory by component and phase, predicted speed, whether it fits, what is wrong with it."""
    from titan_tune.cli.console import stdout_console
    from titan_tune.cli.estimate import run_estimate

    code = run_estimate(
        job,
        gpus=gpus,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        gpu=gpu,
        sets=sets or [],
        hf_config=hf_config,
        sweep=sweep,
        method=method,
        as_json=as_json,
        console=stdout_console(),
        html=html,
        force=force,
        accounting=accounting,
    )
    raise typer.Exit(code)


@app.command()
def search(
    target: Annotated[
        Path, typer.Argument(metavar="JOB|SPACE", help="torchtitan TOML, or a search-space file.")
    ],
    study: Annotated[str | None, typer.Option(help="Name of the study; default: the file's name.")] = None,
    storage: Storage = None,
    runs_dir: Runs = Path("runs"),
    max_probes: Annotated[int | None, typer.Option(min=1, help="Probes in all, finals included.")] = None,
    max_gpu_hours: Annotated[
        float | None, typer.Option(callback=_positive, help="GPU-hours in all, above 0.")
    ] = None,
    max_hours: Annotated[
        float | None,
        typer.Option(callback=_positive, help="Hours of wall clock for this command, above 0."),
    ] = None,
    runner: Annotated[
        str | None,
        typer.Option(
            help="local, slurm (a job a probe), allocation (in salloc: a step a probe) or dry-run (one rank, one GPU);"
            " default: the file's [probe] runner, or local."
        ),
    ] = None,
    parallel: Annotated[
        int | None,
        typer.Option(min=1, help="Probes in flight at once; default 1 (allocation: all that fit)."),
    ] = None,
    on_interrupt: Annotated[
        str, typer.Option(help="Jobs on Ctrl-C: ask, leave (the same command finds them) or cancel.")
    ] = "ask",
    screen: Annotated[
        str | None, typer.Option(help="dry-run: one rank on one GPU chooses before real probes do; or none.")
    ] = None,
    plan_only: Annotated[
        bool, typer.Option("--plan", help="Show what would be searched; run nothing.")
    ] = False,
    gpus: Gpus = None,
    nodes: Nodes = None,
    gpus_per_node: GpusPerNode = None,
    gpu: Gpu = None,
    sets: Sets = None,
    hf_config: HfConfig = None,
    as_json: Json = False,
) -> None:
    """Search for the fastest configuration with short real runs; the same command resumes."""
    from titan_tune.cli.search import SearchOptions, run_search

    options = SearchOptions(
        target=target,
        study=study,
        storage=concealed(storage),
        runs_dir=runs_dir,
        max_probes=max_probes,
        max_gpu_hours=max_gpu_hours,
        max_hours=max_hours,
        runner=runner,
        parallel=parallel,
        on_interrupt=on_interrupt,
        screen=screen,
        plan_only=plan_only,
        gpus=gpus,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        gpu=gpu,
        sets=tuple(sets or ()),
        hf_config=hf_config,
        as_json=as_json,
    )
    raise typer.Exit(run_search(options))


@app.command()
def export(
    study: Annotated[str, typer.Argument(metavar="STUDY", help="Study name, or its folder.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="File to write (default best.toml, best.sh or best.py); with --pareto a folder (front).",
        ),
    ] = None,
    trial: Annotated[int | None, typer.Option(help="This trial instead of the best.")] = None,
    pareto: Annotated[
        bool, typer.Option("--pareto", help="Every configuration that none beats in both speed and memory.")
    ] = False,
    format_name: Annotated[
        str,
        typer.Option(
            "--format",
            help="toml; command prints the launch too; sbatch adds a script; python is a recipe for torchtitan 0.3.0.",
        ),
    ] = "toml",
    storage: Storage = None,
    runs_dir: Runs = Path("runs"),
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    as_json: Json = False,
) -> None:
    """Write the best measured configuration as a torchtitan TOML that runs as it is."""
    from titan_tune.cli.export import run_export

    raise typer.Exit(
        run_export(
            study, output=output, trial=trial, pareto=pareto, format_name=format_name,
            storage=concealed(storage), runs_dir=runs_dir, force=force, as_json=as_json,
        )
    )  # fmt: skip


@app.command()
def report(
    study: Annotated[str, typer.Argument(metavar="STUDY", help="Study name, or its folder.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the page.")] = Path("reports"),
    storage: Storage = None,
    runs_dir: Runs = Path("runs"),
    as_json: Json = False,
) -> None:
    """Write one self-contained HTML page and its Markdown, and print the summary."""
    from titan_tune.cli.report import run_report

    raise typer.Exit(
        run_report(study, output=output, storage=concealed(storage), runs_dir=runs_dir, as_json=as_json)
    )


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what will work on this machine and what silently will not."""
    from titan_tune.cli.console import stdout_console
    from titan_tune.cli.doctor import run_doctor

    raise typer.Exit(run_doctor(as_json=as_json, console=stdout_console()))


@app.command()
def calibrate(
    seconds: Annotated[float, typer.Option(help="Time for measuring, start-up left out.")] = 60.0,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the result here as well.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure this machine's matmul, memory and collective speeds for the predictions."""
    from titan_tune.cli.calibrate import run_calibrate
    from titan_tune.cli.console import stdout_console

    raise typer.Exit(run_calibrate(seconds=seconds, output=output, as_json=as_json, console=stdout_console()))


@app.command()
def diagnose(
    path: Annotated[Path, typer.Argument(metavar="LOG_OR_DIR", help="torchtitan log, or a folder of logs.")],
    as_json: Json = False,
) -> None:
    """Read a torchtitan log: what went wrong or silently did not happen, and the fix."""
    from titan_tune.cli.console import stdout_console
    from titan_tune.cli.diagnose import run_diagnose

    raise typer.Exit(run_diagnose(path, as_json=as_json, console=stdout_console()))


def invoke(arguments: Sequence[str]) -> int:
    """Parse and run; usage errors are one line and exit code 2."""
    command = typer.main.get_command(app)
    try:
        result = command.main(args=list(arguments), prog_name="titan-tune", standalone_mode=False)
    except SystemExit as error:
        # click makes exit code 1 of a closed pipe
        if isinstance(error.__context__, BrokenPipeError):
            raise error.__context__ from None
        raise
    except Exception as error:
        # click's own exceptions, wherever this typer keeps click
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            return fail(_usage(error, arguments), int(error.exit_code))
        if type(error).__name__ == "Abort":
            raise KeyboardInterrupt from error
        raise
    if result == InterruptedSearchError.exit_code:  # what typer makes of Ctrl-C; commands raise the error
        raise KeyboardInterrupt
    return result if isinstance(result, int) else 0


def _usage(error: Exception, arguments: Sequence[str]) -> str:
    context = getattr(error, "ctx", None)
    path = getattr(context, "command_path", "titan-tune")
    message = getattr(error, "format_message", lambda: str(error))()
    value = _given(getattr(getattr(error, "param", None), "opts", ()), arguments)
    shown = f" (given: {value})" if value is not None and value not in message else ""
    return f"{message}{shown} (see: {path} --help)"


def _given(options: Sequence[str], arguments: Sequence[str]) -> str | None:
    """What stands after one of the options on the command line."""
    for i, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name in options:
            return value if equals else next(iter(arguments[i + 1 : i + 2]), None)
    return None
