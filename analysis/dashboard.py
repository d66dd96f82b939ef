"""Look at the runs: in the terminal without an account, or on wandb.ai with one.

    python analysis/dashboard.py                  # W&B's terminal viewer on runs/; space selects a run, q quits
    python analysis/dashboard.py sync=true        # upload the offline runs and make the workspace (entity=, project=)

Without a terminal, the first prints the table of runs and how to open the viewer. The second prints what `wandb sync`
says and the address of the workspace; without an account it says so and ends with code 2.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script, only analysis/ is there

from analysis.runs import arguments, load_runs, run_folders, table, wandb_files
from tracking import PROJECT, logged_in

BATCHES = (1, 32)
WANDB = [sys.executable, "-m", "wandb"]  # the wandb of this interpreter, whatever is on PATH


def segments(root: str | Path) -> list[Path]:
    """The folders W&B wrote under root, one a run or a resumed part, oldest first; empty ones are left out."""
    files = [file for folder in run_folders(root) for file in wandb_files(folder)]
    return [file.parent for file in files if file.stat().st_size > 7]  # 7 bytes: killed before its first record


def gather(root: str | Path) -> Path:
    """Link every segment into `root/wandb/` and return it: the viewer takes one folder with all runs in it."""
    gathered = Path(root) / "wandb"
    gathered.mkdir(exist_ok=True)
    for old in gathered.iterdir():
        if old.is_symlink():  # the run may be gone
            old.unlink()
    for segment in segments(root):
        # the viewer finds the file by the id in the folder's name, so the link cannot be called kv2-s1
        (gathered / segment.name).symlink_to(os.path.relpath(segment, gathered))
    return gathered


def workspace(entity: str, project: str):
    """The workspace of three panels, not saved yet: validation loss, cache bytes and tokens/s by n_kv."""
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

    n_kv = wr.Config("n_kv")
    loss = wr.LinePlot(
        title="validation loss by n_kv",
        y=["val/loss"],
        groupby=n_kv,
        groupby_aggfunc="mean",
        groupby_rangefunc="stderr",  # over seeds
    )
    # the other two are what eval.py measured, at its default batches
    size = wr.BarPlot(
        title="cache bytes by n_kv",
        metrics=[f"kv_bytes_measured_b{batch}" for batch in BATCHES],
        groupby=n_kv,
        groupby_aggfunc="mean",
    )
    speed = wr.BarPlot(
        title="tokens/s by n_kv and batch",
        metrics=[f"tokens_per_s_b{batch}" for batch in BATCHES],
        groupby=n_kv,
        groupby_aggfunc="mean",
    )
    section = ws.Section(name="key-value heads", panels=[loss, size, speed], is_open=True)
    return ws.Workspace(entity=entity, project=project, name="nanoGQA", sections=[section])


def view(root: str) -> int:
    found = segments(root) if Path(root).is_dir() else []
    if not found or not (sys.stdout.isatty() and sys.stdin.isatty()):
        runs, _ = load_runs(root)
        print(table(runs))
        where = "in a terminal" if found else "after a run with wandb=offline"
        print(f"to see the curves: python analysis/dashboard.py, {where}")
        return 0
    return subprocess.run([*WANDB, "leet", str(gather(root))], check=False).returncode


def sync(root: str, entity: str | None, project: str) -> int:
    if not logged_in():
        print("error: no W&B account is logged in: `wandb login`, or set WANDB_API_KEY, and again", file=sys.stderr)
        return 2
    found = [segment for segment in segments(root) if segment.name.startswith("offline-")]
    if not found:
        print(f"error: no offline W&B runs under {root}: train with wandb=offline first", file=sys.stderr)
        return 2
    # all at once: the parts of a resumed run carry one id, which makes wandb upload them in order as one run
    place = ["--project", project] + (["--entity", entity] if entity else [])
    code = subprocess.run([*WANDB, "sync", *place, *map(str, found)], check=False).returncode
    if code:
        print("error: wandb sync failed; what is uploaded stays, the same command continues", file=sys.stderr)
        return code
    if importlib.util.find_spec("wandb_workspaces") is None:
        print("no workspace made: `pip install wandb-workspaces`, and again")
        return 0
    import wandb

    try:
        entity = entity or wandb.Api(timeout=30).default_entity
        print(f"workspace: {workspace(entity, project).save().url}")
    except Exception as error:  # noqa: BLE001 - its client raises what it likes, and the runs are uploaded already
        print(f"no workspace made: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    return 0


def main() -> None:
    given = arguments(("sync", "root", "entity", "project"))
    root = given.get("root", "runs")
    if given.get("sync", "false") not in ("true", "false"):
        print(f"error: sync={given['sync']} is not allowed; it takes true or false", file=sys.stderr)
        sys.exit(2)
    if given.get("sync") == "true":
        sys.exit(sync(root, given.get("entity"), given.get("project", PROJECT)))
    sys.exit(view(root))


if __name__ == "__main__":
    main()
