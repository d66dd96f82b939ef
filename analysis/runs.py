"""Load runs into two tables: one row a run, and the history of their metrics.

    python analysis/runs.py                            # what is there under runs/
    python analysis/runs.py sweep=cpu                  # one sweep
    python analysis/runs.py source=wandb sweep=cpu     # the same from wandb.ai (entity=, project=)

Prints a line a run, and a line for each run whose W&B file could not be used. A notebook says

    from analysis.runs import load_runs
    runs, history = load_runs(sweep="cpu")
"""

import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # `python analysis/runs.py` puts only analysis/ there

from tracking import PROJECT, filterable, read_line

COLUMNS = ["sweep", "name", "job_type", "n_kv", "seed", "state", "rows", "read_from"]
RESULTS = ["steps", "val_loss_final", "val_loss_best", "tokens_per_s"]  # shown by `table` where a run has them


def load_runs(
    root: str | Path = "runs",
    sweep: str | None = None,
    source: str = "local",
    entity: str | None = None,
    project: str = PROJECT,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Load the runs under `root/<sweep>/<name>/`, or with source="wandb" those of wandb.ai, as (runs, history).

    runs: a row a run, with the columns of COLUMNS, then the config (nested names dotted, `model.n_kv`), the provenance
        (`commit`, `machine`, …), the summary (its values win over the config's) and `eval.*`. `state` is finished,
        failed (closed by an exception) or unfinished (still running, or killed); from wandb.ai also running and
        crashed. `rows` counts the history.
    history: a row a run and step: sweep, name, step (iteration), then a column a metric (`train/loss`, `val/loss`, …).

    A local run is read from its .wandb file when that holds every row of `metrics.jsonl`, else from `metrics.jsonl`
    itself; `read_from` says which, and each fallback prints a line.
    Raises ValueError for an unknown source, RuntimeError when wandb.ai cannot be asked.
    """
    if source not in ("local", "wandb"):
        raise ValueError(f"source {source!r} does not exist; allowed are local, wandb")
    if source == "wandb":
        loaded = _from_api(sweep, entity, project)
    else:
        folders = run_folders(root, sweep)
        with ThreadPoolExecutor(8) as pool:  # a reader process a file: ~25 ms each, most of it waiting
            loaded = list(pool.map(_from_folder, folders))
    for _, _, notes in loaded:
        for note in notes:
            print(note, file=sys.stderr)
    runs = pd.DataFrame([row for row, _, _ in loaded], columns=None if loaded else COLUMNS)
    for key in ("n_kv", "seed"):
        if key in runs and pd.api.types.is_numeric_dtype(runs[key]):
            runs[key] = runs[key].astype("Int64")  # one run without it would turn the others' 2 into 2.0
    history = pd.DataFrame([line for _, lines, _ in loaded for line in lines], columns=None if loaded else ["step"])
    return runs, history


def run_folders(root: str | Path, sweep: str | None = None) -> list[Path]:
    """The run folders under root, sorted."""
    marks = ("config.yaml", "metrics.jsonl", "wandb")
    folders = sorted(path for path in Path(root).glob(f"{sweep or '*'}/*") if path.is_dir())
    return [path for path in folders if any((path / mark).exists() for mark in marks)]


def wandb_files(folder: Path) -> list[Path]:
    """The .wandb files of the run's own id, oldest first: a resumed run has one a segment."""
    # an interrupted run that started afresh left files of an id that is no longer its own
    id_file = folder / "wandb_id.txt"
    run_id = id_file.read_text().strip() if id_file.exists() else "*"
    files = folder.glob(f"wandb/*run-*/run-{run_id}.wandb")
    return sorted(files, key=lambda file: re.sub(r"^(offline-)?run-", "", file.parent.name))


def table(runs: pd.DataFrame) -> str:
    """The runs as text, a line a run."""
    if runs.empty:
        return "no runs"
    shown = runs[[name for name in COLUMNS + RESULTS if name in runs]]
    return shown.to_string(index=False, na_rep="-")


def _from_folder(folder: Path) -> tuple[dict, list[dict], list[str]]:
    sweep, name = folder.parent.name, folder.name
    metrics = folder / "metrics.jsonl"
    local: dict[int, dict] = {}
    for line in metrics.read_bytes().splitlines() if metrics.exists() else []:
        if row := read_line(line):
            local.setdefault(row.pop("step"), {}).update(row)  # two logs at one step are one row, as in W&B

    files = wandb_files(folder)
    stream = _merge([_read_wandb(file) for file in files])
    rows, read_from, notes = stream["rows"], "wandb", []
    if metrics.exists() and rows.keys() != local.keys():
        rows, read_from = local, "metrics.jsonl"
    if metrics.exists() and not files:
        rows, read_from = local, "metrics.jsonl"  # W&B was disabled: nothing was lost, so nothing to say
    elif read_from != "wandb":
        why = f" ({'; '.join(stream['complaints'])})" if stream["complaints"] else ""
        found = f"{len(stream['rows'])} of {len(local)} rows"
        notes.append(f"{sweep}/{name}: read from metrics.jsonl, since {files[-1]} gives {found}{why}")
    elif stream["complaints"] and not metrics.exists():
        why = "; ".join(stream["complaints"])
        notes.append(f"{sweep}/{name}: {len(rows)} rows from {files[-1]}, maybe not all ({why})")

    config = stream["config"] or _yaml(folder / "config.yaml")
    config = {**config, "provenance": _read_json(folder / "provenance.json") or config.get("provenance", {})}
    summary = {**stream["summary"], **_read_json(folder / "summary.json")}
    if (folder / "summary.json").exists():
        state = "finished"  # written last, on success only
    elif stream["exit_code"] == 0 and not metrics.exists():
        state = "finished"
    else:
        state = "failed" if stream["exit_code"] else "unfinished"
    job_type = stream["job_type"]
    row = _row(sweep, name, job_type, config, state, len(rows), read_from, summary)
    return row, _history(sweep, name, rows), notes


def _row(sweep, name, job_type, config, state, rows, read_from, values) -> dict:
    config = filterable(config)
    provenance = config.pop("provenance", {})
    config = {**_flat(config), **provenance}
    own = {"sweep": sweep, "name": name, "job_type": job_type or config.get("script")}
    own.update(n_kv=config.get("n_kv"), seed=config.get("seed"), state=state, rows=rows, read_from=read_from)
    return {**own, **{key: value for key, value in {**config, **values}.items() if key not in own}}


def _history(sweep: str, name: str, rows: dict[int, dict]) -> list[dict]:
    return [{"sweep": sweep, "name": name, "step": step, **rows[step]} for step in sorted(rows)]


def _read_wandb(file: Path) -> dict:
    """One .wandb file through W&B's reader: rows by step, config, summary, job_type, exit_code, complaints."""
    found = {"rows": {}, "config": {}, "summary": {}, "job_type": None, "exit_code": None, "complaints": []}
    # `wandb leet inspect --json FILE` runs just this program, but takes 0.8 s to import wandb first; this takes 25 ms
    package = importlib.util.find_spec("wandb")
    program = Path(package.origin).parent / "bin" / "wandb-core" if package else Path("wandb-core")
    command = [str(program), "leet", "inspect", "--no-observability", "--json", "--run-file", str(file.resolve())]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, encoding="utf-8", timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        found["complaints"].append(f"W&B's reader does not run: {error}")
        return found
    found["complaints"] += [line.removeprefix("wandb leet inspect: ") for line in done.stderr.splitlines() if line]
    if not done.stdout:
        found["complaints"].append(f"{file.name} holds no record in its {file.stat().st_size} bytes")
    for line in done.stdout.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # the reader itself was cut off; the row count will tell
        body = record.get(record["type"], {})
        if record["type"] == "history":
            metrics = _metrics(body["item"])
            if metrics:  # a row of texts and images only is no row of metrics
                found["rows"].setdefault(body["step"].get("num", 0), {}).update(metrics)
        elif record["type"] == "run":
            update = body.get("config", {}).get("update", {})
            found["config"] = {key: value for key, value in update.items() if key != "_wandb"}
            found["job_type"] = body.get("job_type")
        elif record["type"] == "summary":
            found["summary"].update(body.get("update", {}))
        elif record["type"] == "exit":
            found["exit_code"] = body.get("exit_code", 0)
    return found


def _merge(segments: list[dict]) -> dict:
    """The segments of a resumed run, oldest first, as one."""
    merged = {"rows": {}, "config": {}, "summary": {}, "job_type": None, "exit_code": None, "complaints": []}
    for segment in segments:
        if segment["rows"]:
            # it went on from a checkpoint: what was logged beyond that, it logged again
            first = min(segment["rows"])
            merged["rows"] = {step: row for step, row in merged["rows"].items() if step <= first}
        for step, row in segment["rows"].items():
            merged["rows"].setdefault(step, {}).update(row)
        merged["summary"].update(segment["summary"])
        merged["config"] = segment["config"] or merged["config"]
        merged["job_type"] = segment["job_type"] or merged["job_type"]
        merged["exit_code"] = segment["exit_code"]  # the last one's: an older segment's end is not the run's
        merged["complaints"] += segment["complaints"]
    logged = {key for row in merged["rows"].values() for key in row}
    # W&B's summary also repeats the last value of each metric; those are in the history
    merged["summary"] = {key: value for key, value in _own(merged["summary"]).items() if key not in logged}
    return merged


def _metrics(item: dict) -> dict:
    """The numbers of a W&B row. W&B writes NaN and the infinities as strings."""
    special = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
    numbers = {key: special.get(value, value) if isinstance(value, str) else value for key, value in item.items()}
    return {key: value for key, value in _own(numbers).items() if isinstance(value, (int, float))}


def _own(item: dict) -> dict:
    """What we logged ourselves: without W&B's `_runtime` and such, and without texts and images, which it flattens."""
    media = {key.removesuffix("._type") for key in item if key.endswith("._type")}
    numbers = {key: value for key, value in item.items() if key.rpartition(".")[0] not in media}
    return {k: v for k, v in numbers.items() if not k.startswith("_") and not (isinstance(v, dict) and "_type" in v)}


def _from_api(sweep: str | None, entity: str | None, project: str) -> list[tuple[dict, list[dict], list[str]]]:
    import wandb  # here: reading local runs does not need it

    loaded = []
    try:
        api = wandb.Api(timeout=30)
        path = f"{entity or api.default_entity}/{project}"
        for run in api.runs(path, filters={"group": sweep} if sweep else {}):
            rows: dict[int, dict] = {}
            for item in run.scan_history():
                if metrics := _metrics(item):
                    rows.setdefault(item["_step"], {}).update(metrics)
            notes = []
            if not rows and run.lastHistoryStep >= 0:
                version = importlib.metadata.version("wandb")
                bad = "0.27.1 and 0.27.2 lose the history of runs that do not start at step 0"
                notes.append(f"{run.name}: wandb {version} gives no rows up to step {run.lastHistoryStep}; {bad}")
            logged = {key for row in rows.values() for key in row}
            summary = {key: value for key, value in _own(dict(run.summary)).items() if key not in logged}
            config = {key: value for key, value in run.config.items() if not key.startswith("_")}
            row = _row(run.group, run.name, run.job_type, config, run.state, len(rows), "wandb.ai", summary)
            loaded.append((row, _history(run.group, run.name, rows), notes))
    except (wandb.errors.Error, ValueError, OSError) as error:
        reason = str(error).split("\n")[0]
        raise RuntimeError(f"wandb.ai cannot be asked ({reason}); `wandb login` first, or source=local") from None
    return loaded


def _flat(values: dict, prefix: str = "") -> dict:
    flat = {}
    for key, value in values.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat


def _yaml(path: Path) -> dict:
    return yaml.safe_load(path.read_text(encoding="utf-8")) or {} if path.exists() else {}


def _read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def arguments(allowed: tuple[str, ...]) -> dict[str, str]:
    """The key=value words of the command line; ends with one line and code 2 for anything else."""
    given = {}
    if {"--help", "-h"} & set(sys.argv[1:]):
        print(sys.modules["__main__"].__doc__.strip())
        sys.exit(0)
    for word in sys.argv[1:]:
        key, equals, value = word.partition("=")
        if not equals or not value or key not in allowed:
            takes = ", ".join(f"{name}=…" for name in allowed)
            print(f"error: {word!r} is not allowed; it takes {takes}", file=sys.stderr)
            sys.exit(2)
        given[key] = value
    return given


def main() -> None:
    try:
        runs, _ = load_runs(**arguments(("root", "sweep", "source", "entity", "project")))
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(table(runs))


if __name__ == "__main__":
    main()
