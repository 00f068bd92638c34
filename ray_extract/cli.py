"""ray-extract plan | manifests | run | submit | retry-failed | status | verify | export | sweep."""

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ray_extract import layout, run
from ray_extract.config import load_job
from ray_extract.console import complain, parse, tell
from ray_extract.cost import Rates, check_space, cost_lines
from ray_extract.dataset.prepared import PreparedRows
from ray_extract.errors import ConfigError, Exit, RayExtractError
from ray_extract.ledger import Ledger, orphans
from ray_extract.plan import estimate, load_or_make_plan, sample_units, show_bytes
from ray_extract.presets import TARGETS
from ray_extract.progress import show_count
from ray_extract.status import run_status
from ray_extract.store import open_store

_MOST = 1e15  # of a rate or a price: what is computed from it stays a number


def make_parser() -> argparse.ArgumentParser:
    """Every command and its arguments."""
    parser = argparse.ArgumentParser(
        prog="ray-extract", description="Hidden states of large language models, at scale."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    for name, action, text in (
        ("plan", _plan, "say what a job would extract and what it takes; writes nothing"),
        ("run", _run, "run a job, or what is left of it"),
        ("retry-failed", _retry_failed, "extract the failed rows of a complete run again"),
    ):
        command = commands.add_parser(name, help=text)
        run.add_job_arguments(command)
        command.set_defaults(action=action)
        if name == "plan":
            _add_rates(command)

    manifests = commands.add_parser("manifests", help="a job as Kubernetes objects for KubeRay (docs/kubernetes.md)")
    run.add_job_arguments(manifests)
    manifests.add_argument(
        "--model-config", metavar="DIR", help="a folder with the model's config.json, if model.path is not here"
    )
    manifests.add_argument("--cluster", action="store_true", help="a RayCluster that stays, in place of a RayJob")
    manifests.add_argument("--output", type=Path, metavar="DIR", help="write a kustomize tree there, with overlays")
    manifests.set_defaults(action=_manifests)
    submit = commands.add_parser(
        "submit",
        help="run a job on a Ray cluster and follow it to its end",
        description="Run a job on a Ray cluster, show its log and end with its exit code. Ctrl-C only stops following.",
    )
    run.add_job_arguments(submit)
    submit.add_argument("--address", metavar="URL", help="the cluster's dashboard, http://HEAD:8265; else RAY_ADDRESS")
    submit.add_argument(
        "--working-dir", metavar="DIR", help="a folder that goes along, with the job file in it; else that alone"
    )
    submit.add_argument("--python", default="python", metavar="PATH", help="the interpreter on the cluster")
    submit.add_argument("--submission-id", metavar="NAME", help="the job's name")
    submit.add_argument("--detach", action="store_true", help="do not follow it")
    submit.add_argument("--attach", metavar="NAME", help="follow a job that was submitted, and submit nothing")
    submit.set_defaults(action=_submit)

    status = commands.add_parser("status", help="how far a run is, from its output alone")
    status.add_argument("url", help="output.url of the run")
    status.add_argument("--json", action="store_true", help="print it as JSON")
    status.set_defaults(action=_status)

    verify = commands.add_parser("verify", help="read every shard again and compare it with plan, commits and digests")
    verify.add_argument("url", help="output.url of the run")
    verify.add_argument(
        "--recompute", type=_whole, default=0, metavar="N", help="recompute N random rows with transformers"
    )
    verify.add_argument("--model", metavar="PATH", help="checkpoint for --recompute")
    verify.add_argument(
        "--boundary",
        type=_whole,
        action="append",
        default=[],
        metavar="B",
        help="recompute this state only, so load only the layers below it; may be given several times",
    )
    verify.add_argument("--seed", type=_whole, default=0, help="which rows --recompute takes")
    verify.set_defaults(action=_verify)

    export = commands.add_parser("export", help="write a finished run's states in the format of a trainer")
    export.add_argument("url", help="output.url of the run")
    export.add_argument(
        "--to", required=True, choices=sorted({t.trainer for t in TARGETS.values()}), help="the trainer"
    )
    export.add_argument(
        "--strategy", default="eagle3", choices=sorted({t.strategy for t in TARGETS.values()}), help="what it trains"
    )
    export.add_argument("--out", required=True, metavar="DIR", help="a folder; run again to go on with it")
    export.add_argument(
        "--draft-config", metavar="FILE", help="the draft's config.json: its layers and vocabulary sizes"
    )
    export.add_argument(
        "--boundaries", type=_numbers, metavar="B,B,...", help="which, in the draft's order, if the run has more"
    )
    export.add_argument(
        "--draft-vocab", type=_whole, metavar="D", help="write the maps of a reduced vocabulary of D tokens"
    )
    export.add_argument("--vocab-size", type=_whole, metavar="V", help="tokens of the target's vocabulary")
    export.add_argument("--max-length", type=_whole, metavar="T", help="cut rows to T tokens, as the trainer would")
    export.add_argument(
        "--min-supervised", type=_whole, default=1, metavar="M", help="leave out rows with fewer supervised tokens"
    )
    export.add_argument(
        "--link", action="store_true", help="speculators: leave the states in the run, for the backend ray_extract"
    )
    export.add_argument(
        "--fp8", action="store_true", help="speculators: write the states in fp8, for its backend fp8; half the bytes"
    )
    export.set_defaults(action=_export)

    sweep = commands.add_parser("sweep", help="list shards that lost: another attempt at their unit is committed")
    sweep.add_argument("url", help="output.url of the run")
    sweep.add_argument("--delete", action="store_true", help="delete them; otherwise nothing is changed")
    sweep.set_defaults(action=_sweep)

    for command in (status, verify, export, sweep):
        command.add_argument(
            "--option", action="append", default=[], metavar="KEY=VALUE", help="as output.storage_options of the job"
        )

    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code."""
    args = parse(make_parser(), argv)
    try:
        code: int = args.action(args)
    except RayExtractError as error:
        complain(error)
        return error.exit_code
    except KeyboardInterrupt:
        complain("ended before its end, on request")
        return Exit.STOPPED
    return code


def _add_rates(command: argparse.ArgumentParser) -> None:
    speed = command.add_mutually_exclusive_group()
    text = "what one engine prefills in a second: gives bandwidth and hours"
    speed.add_argument("--tokens-per-second", type=_positive, metavar="X", help=text)
    text = "find that out: start an engine, on the Ray cluster or a local one, and extract N rows"
    speed.add_argument("--trial", type=_from_one, metavar="N", help=text)
    for name, text in (
        ("gpu-hour", "price of a GPU for an hour"),
        ("gb-month", "price of storing a GB for a month"),
    ):
        command.add_argument(f"--{name}", type=_positive, metavar="X", help=text)
    command.add_argument("--node-gpus", type=_from_one, default=8, metavar="N", help="GPUs of a node; 8 when absent")
    command.add_argument("--skipped", action="store_true", help="list the rows that cannot be used, with their reasons")


def _plan(args: argparse.Namespace) -> int:
    job, shape, boundaries, output = run.check_job(load_job(args.config, run.overrides(args)))
    if job.num_gpus > args.node_gpus:
        raise ConfigError(
            f"--node-gpus {args.node_gpus}: an engine takes {job.num_gpus} GPUs of one node; say how many a node has"
        )
    size = run.token_bytes(job, shape, boundaries)
    # A plan for looking at claims no output.
    with run.interruptible(), tempfile.TemporaryDirectory(prefix="ray_extract-plan-") as folder:
        store = open_store(folder)
        index, units = load_or_make_plan(store, job, shape, size, identity="")  # of a folder that nobody else has
        summary = estimate(index, units, size)
        arena = job.run.arena_bytes or run.arena_size(units, job.run.units_in_flight)
        tell(
            f"model     {shape.architecture}, {shape.num_layers} layers, hidden {shape.hidden}, {shape.dtype}",
            f"captures  {', '.join([*map(str, boundaries), *(['final'] if job.capture.final else [])])}",
            *summary.lines(),
        )
        speed = args.tokens_per_second
        if args.trial is not None:
            from ray_extract.trial import try_out  # loads Ray and torch

            some = sample_units(store, index, job, size, args.trial)
            setup = run.extractor_setup(job, shape, boundaries, some)
            trial = try_out(job, setup, PreparedRows(store, index), some)
            tell(trial.line())
            speed = trial.tokens_per_second
        tell(*cost_lines(job, summary, arena, Rates(speed, args.node_gpus, args.gpu_hour, args.gb_month)))
        if args.skipped:
            for source, reason in PreparedRows(store, index).skipped():
                tell(f"{source}  {reason}")
    check_space(output, summary.state_bytes)
    return 0


def _manifests(args: argparse.Namespace) -> int:
    from ray_extract.manifests import checked, cluster_objects, job_objects, render, tree

    job, shape = checked(load_job(args.config, run.overrides(args)), args.model_config)
    if args.output is None:
        tell(render((cluster_objects if args.cluster else job_objects)(job, shape)).rstrip("\n"))
        return 0
    for name, text in tree(job, shape).items():
        path = args.output / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        except OSError as error:
            raise ConfigError(f"--output {args.output}: {name} cannot be written: {error.strerror}") from None
    tell(f"written to {args.output}; next: kubectl apply -k {args.output / 'job'}")
    return 0


def _run(args: argparse.Namespace) -> int:
    return run.execute(args, run.run)


def _retry_failed(args: argparse.Namespace) -> int:
    return run.execute(args, run.retry_failed)


def _submit(args: argparse.Namespace) -> int:
    from ray_extract import submit

    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(levelname).1s %(message)s")
    if args.attach is not None:
        return submit.follow(submit.connect(args.address), args.attach, args.address)
    if args.config is None:
        raise ConfigError("--config is missing: the job file to submit, or --attach NAME to follow a job")
    overrides = run.overrides(args)
    job = load_job(args.config, overrides)
    request = submit.Request(
        config=Path(args.config),
        overrides=overrides,
        working_dir=None if args.working_dir is None else Path(args.working_dir),
        python=args.python,
        submission_id=args.submission_id,
    )
    submit.entrypoint(request)
    client = submit.connect(args.address)
    name = submit.submit(client, request, job)
    tell(f"job {name} is submitted", submit.ways(name, args.address))
    return Exit.OK if args.detach else submit.follow(client, name, args.address)


def _status(args: argparse.Namespace) -> int:
    status = run_status(open_store(args.url, _options(args.option)))
    tell(*([json.dumps(status.to_json(), indent=2)] if args.json else status.lines()))
    return 0


def _verify(args: argparse.Namespace) -> int:
    from ray_extract.verify import verify

    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname).1s %(message)s")
    report = verify(
        args.url,
        _options(args.option),
        recompute=args.recompute,
        seed=args.seed,
        model_path=args.model,
        boundaries=args.boundary,
    )
    tell(*report.lines())
    return Exit.OK if report.ok else Exit.FAILED


def _export(args: argparse.Namespace) -> int:
    from ray_extract.exporters.export import Request, export

    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname).1s %(message)s")
    report = export(
        Request(
            url=args.url,
            target=f"{args.to}-{args.strategy}",
            out=args.out,
            boundaries=args.boundaries,
            draft_config=args.draft_config,
            draft_vocab=args.draft_vocab,
            vocab_size=args.vocab_size,
            max_length=args.max_length,
            min_supervised=args.min_supervised,
            link=args.link,
            fp8=args.fp8,
            storage_options=_options(args.option),
        )
    )
    tell(*report.lines())
    return 0


def _sweep(args: argparse.Namespace) -> int:
    store = open_store(args.url, _options(args.option))
    if Ledger(store).identity() is None:
        raise ConfigError(f"{args.url}: no {layout.RUN_KEY} there; not the output of a run")
    lost = orphans(store)
    for item in lost:
        if args.delete:
            store.delete(item.key)
        tell(f"{'deleted' if args.delete else 'lost'}  {item.key}  {show_bytes(item.size)}")
    did = "deleted" if args.delete else "would be deleted with --delete"
    size = show_bytes(sum(item.size for item in lost))
    tell(
        f"{show_count(len(lost), 'shard')}, {size}, {did}"
        if lost
        else "nothing to sweep: no shard here lost to another one"
    )
    return 0


def _whole(text: str) -> int:
    """A whole number, not negative. Of a ValueError argparse would make a message that names this function."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number") from None
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text!r}: must not be negative")
    return number


def _from_one(text: str) -> int:
    if (number := _whole(text)) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: must be more than 0")
    return number


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number") from None
    if not 0 < number <= _MOST:
        raise argparse.ArgumentTypeError(f"{text!r}: must be more than 0, and {_MOST:g} at most")
    return number


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_whole(part) for part in text.split(","))


def _options(items: Sequence[str]) -> dict[str, str]:
    options = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not key or not equals:
            raise ConfigError(f"--option {key!r}: must be KEY=VALUE")
        options[key] = value
    return options
