"""
Execute the notebooks on a sweep's runs. They are kept as plain scripts, analysis/loss.py and so on; this makes the .ipynb.

    python analysis/notebooks.py                        the cpu sweep -> analysis/*.ipynb, results/figures/
    python analysis/notebooks.py sweep=smoke            another sweep -> runs/smoke/results/
    python analysis/notebooks.py notebook=loss          only one of them; wandb=online|offline|disabled as in training
    python analysis/notebooks.py notebook=budget        the one that only counts: it needs no runs

Prints a line a notebook. Nothing is trained or measured. The same runs give the same files, byte for byte. Each execution
is also a W&B run, analysis-<notebook>, with the figures. `uptrain`, `quant` and `retrieval` are left out where what they
read has not been run.
"""

import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # `python analysis/notebooks.py` puts only analysis/ there

from analysis import quant_tables, uptrain_tables
from analysis.runs import arguments, load_runs
from analysis.tables import sweep_table
from tracking import MODES, Run

ROOT = Path(__file__).resolve().parent.parent
FIGURES = {
    "loss": ("loss", "uptrain"),
    "cache": ("cache",),
    "speed": ("speed", "speed_batch"),
    "budget": ("budget", "budget_crossover", "budget_precision", "budget_parallel"),
    "uptrain": ("uptrain_curve_gpt2", "uptrain_curve_llama", "uptrain_cost_gpt2", "uptrain_cost_llama"),
    "quant": ("quant", "quant_smollm2", "quant_newest", "quant_axes", "quant_magnitudes"),
    "retrieval": ("quant_retrieval", "quant_passkey"),
}
# of what goes beyond `make sweep`: left out where it has not been run
BEYOND = {"uptrain": uptrain_tables.load, "quant": quant_tables.load, "retrieval": quant_tables.load}
WITHOUT_RUNS = ("budget",)  # it counts, and reads no run
SECONDS = 300  # for a cell; it takes a few on a laptop


def build(name):
    """The notebook of analysis/<name>.py, not executed: cells with fixed ids, only the metadata that a viewer needs."""
    import jupytext

    notebook = jupytext.read(Path(__file__).with_name(f"{name}.py"), fmt="py:percent")
    for i, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"{name}-{i:02}", {}
    notebook.metadata = {
        "jupytext": {"formats": "ipynb,py:percent"},
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def execute(name, sweep):
    """The executed notebook. Raises RuntimeError, in one line naming the cell, when a cell fails."""
    from jupyter_client import AsyncKernelManager
    from jupyter_client.kernelspec import KernelSpec
    from nbclient import NotebookClient
    from nbclient.exceptions import CellControlSignal, CellExecutionError, DeadKernelError
    from traitlets import default

    notebook = build(name)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        env = {
            **os.environ, "SWEEP": sweep, "IPYTHONDIR": folder, "JUPYTER_CONFIG_DIR": folder,
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # a warning about the debugger, which nobody asked for
        }  # fmt: skip

        class Kernel(AsyncKernelManager):
            """A kernel of this interpreter: no kernelspec need be installed, and none of another Python is picked up."""

            @property
            def kernel_spec(self):
                argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
                return KernelSpec(argv=argv, display_name="Python 3", language="python")

            @default("connection_file")
            def _in_the_folder(self):
                return os.path.join(folder, "kernel.json")

            @default("transport")
            def _sockets_in_the_folder(self):
                # no ports, and closed to other users; the system allows a socket's path about 100 letters
                return "ipc" if os.name == "posix" and len(folder) < 80 else "tcp"

        client = NotebookClient(
            notebook,
            kernel_manager_class=Kernel,
            timeout=SECONDS,
            record_timing=False,
            resources={"metadata": {"path": str(ROOT / "analysis")}},
        )
        try:
            client.execute(env=env)
        except (CellExecutionError, CellControlSignal, DeadKernelError) as error:
            failed = next((c for c in notebook.cells if any(o.output_type == "error" for o in c.get("outputs", []))), None)
            what = f"{error.ename}: {error.evalue}" if isinstance(error, CellExecutionError) else str(error)
            where = f", cell {failed.id} ({failed.source.strip().splitlines()[0]})" if failed else ""
            raise RuntimeError(f"{name}.py{where}: {what.strip().splitlines()[-1]}") from None
    notebook.metadata = build(name).metadata  # the kernel has added its version
    for cell in notebook.cells:
        cell.metadata = {}
    return notebook


def write(notebook, path):
    """Write the notebook, its last version whole until then."""
    import nbformat

    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def make(name, sweep):
    """Execute and write one notebook -> (one line about it, whether it worked)."""
    start = time.perf_counter()
    path = (ROOT / "analysis" if sweep == "cpu" else ROOT / "runs" / sweep / "results") / f"{name}.ipynb"
    try:
        write(execute(name, sweep), path)
    except RuntimeError as error:
        return f"error: {error}", False
    return f"{name}: {time.perf_counter() - start:.1f} s -> {path.relative_to(ROOT)}", True


def record(name, sweep, mode, n_runs):
    """The notebook's figures as a W&B run."""
    figures = (ROOT / "results" if sweep == "cpu" else ROOT / "runs" / sweep / "results") / "figures"
    folder = ROOT / "runs" / sweep / f"analysis-{name}"
    config = {"script": "analysis", "sweep": sweep, "name": folder.name, "notebook": f"analysis/{name}.ipynb"}
    with Run(folder, name=folder.name, group=sweep, job_type="analysis", config=config, mode=mode) as run:
        for figure in FIGURES[name]:
            if (figures / f"{figure}.png").exists():
                run.image(f"figure/{figure}", figures / f"{figure}.png")
        (folder / "config.yaml").write_text(json.dumps(config, indent=1))  # JSON is YAML
        run.summary({"runs_read": n_runs})


def main():
    given = arguments(("sweep", "notebook", "wandb"))
    sweep, mode = given.get("sweep", "cpu"), given.get("wandb", "offline")
    names = [given["notebook"]] if "notebook" in given else list(FIGURES)
    for key, value, allowed in (("notebook", names[0], FIGURES), ("wandb", mode, MODES)):
        if value not in allowed:
            print(f"error: {key}={value} is not allowed; it takes {', '.join(allowed)}", file=sys.stderr)
            sys.exit(2)
    runs, _ = load_runs(ROOT / "runs", sweep=sweep)
    runs = runs[runs.job_type != "analysis"]
    try:
        if set(names) - set(WITHOUT_RUNS) - set(BEYOND):
            if runs.empty:
                raise ValueError("no runs")
            sweep_table(runs)
    except ValueError as error:
        print(f"error: runs/{sweep}: {error}; `make sweep PRESET={sweep}` makes them", file=sys.stderr)
        sys.exit(2)
    for load in dict.fromkeys(BEYOND[name] for name in names if name in BEYOND):
        found, missing = load(sweep, ROOT / "runs")
        if not found:
            left_out = [name for name in names if BEYOND.get(name) is load]
            print(f"{', '.join(left_out)}: left out; {'; '.join(missing)}", file=sys.stderr)
            names = [name for name in names if name not in left_out]
    failed = False
    with ThreadPoolExecutor(max(1, len(names))) as pool:  # most of a notebook's time is one kernel's imports
        for name, (line, worked) in zip(names, pool.map(lambda name: make(name, sweep), names), strict=True):
            print(line, file=sys.stdout if worked else sys.stderr, flush=True)
            failed |= not worked
            if worked:
                record(name, sweep, mode, 0 if name in WITHOUT_RUNS else len(runs))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
