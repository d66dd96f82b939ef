"""The one door to W&B, and the local metrics file.

    with Run(folder, name="kv2-s1", group="cpu", job_type="train", config=config) as run:
        run.log({"train/loss": 1.2, "val/loss": 1.3}, step=10)
        run.summary({"val_loss_final": 1.3})

The folder gets `metrics.jsonl` (a line a log), `summary.json` (only once the run finished), `wandb_id.txt`, `wandb/`.
The local files are the record; W&B carries the same numbers under the same names. W&B may fail in any way it likes:
that costs one line on stderr, never the training.
"""

import dataclasses
import functools
import html
import importlib.metadata
import json
import os
import platform
import re
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

PROJECT = "nanogqa"
MODES = ("offline", "online", "disabled")
START_SECONDS = 20  # wandb.init: ~1 s offline; online without a network it retries for as long as we let it
CALL_SECONDS = 30  # a log only hands bytes to the service, ~0.1 ms; half a minute means the service hangs
FINISH_SECONDS = 60  # online: what is not uploaded by then stays on disk for `wandb sync`


def provenance() -> dict:
    """Say what code, on what machine, with what versions. Plain types only; works outside a git checkout.

    Returns commit (short sha, or "unknown"), dirty (tracked files differ from the commit), machine, and the versions of
    python, torch, numpy, wandb and hydra ("missing" for one that is not installed).
    """
    commit = _git("rev-parse", "--short", "HEAD")
    # what the runs themselves regenerate does not change them
    made = (":!README.md", ":!results", ":!analysis/*.ipynb")
    changes = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", *made)
    packages = {"torch": "torch", "numpy": "numpy", "wandb": "wandb", "hydra": "hydra-core"}
    return {
        "commit": commit or "unknown",
        "dirty": bool(changes),
        "machine": _machine(),
        "python": platform.python_version(),
        **{name: _version(package) for name, package in packages.items()},
    }


def commit(made_by: dict) -> str:
    """The commit for a table: short sha, "-dirty" behind it when tracked files differed."""
    return made_by["commit"] + ("-dirty" if made_by["dirty"] else "")


def _git(*args: str) -> str:
    # the folder of this file, not the working directory: Hydra and pytest both move about
    command = ["git", "-C", str(Path(__file__).resolve().parent), *args]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


@functools.cache
def _machine() -> str:
    import torch  # here, so that reading runs does not pay for it

    cpu = platform.processor() or "unknown CPU"
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        cpu = found.group(1).strip() if found else cpu
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{cpu} ({os.cpu_count()} cores){gpu}, {platform.system()} {platform.machine()}"


def plain(value: object, name: str = "config") -> object:
    """Turn a config or metrics into plain dicts, lists, str, int, float, bool and None, as JSON and W&B filters need.

    Takes dataclasses, DictConfig (interpolations resolved), tuples, Path, and NumPy scalars and tensors of one element.
    Raises TypeError naming the key for anything else.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if type(value).__module__.startswith("omegaconf"):
        from omegaconf import OmegaConf

        return plain(OmegaConf.to_container(value, resolve=True), name)  # wandb 0.31 raises on a DictConfig
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(dataclasses.asdict(value), name)
    if isinstance(value, dict):
        return {str(key): plain(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{name}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item") and getattr(value, "size", None) == 1:  # a NumPy scalar; its float64 is a float subclass
        return value.item()
    if hasattr(value, "item") and hasattr(value, "numel") and value.numel() == 1:  # a tensor
        return value.item()
    kind = type(value).__name__
    raise TypeError(f"{name} is a {kind}; allowed are str, int, float, bool, None, lists and dicts of them")


def filterable(config: object) -> dict:
    """Return the plain config with `n_kv` and `seed` at the top level too, so that runs filter by them."""
    config = plain(config)
    sections = [section for section in config.values() if isinstance(section, dict)]
    for key in ("n_kv", "seed"):
        for section in sections:
            if key in section:
                config.setdefault(key, section[key])
    return config


@dataclasses.dataclass(frozen=True)
class WandbConfig:
    """configs/wandb/. Raises ValueError, in one line, for an unknown mode."""

    mode: str
    project: str = PROJECT
    entity: str | None = None  # a user or a team; None: the account's default

    def __post_init__(self):
        if self.mode not in MODES:
            raise ValueError(f"wandb.mode={self.mode!r} does not exist; allowed are {', '.join(MODES)}")


class Run:
    """A run of one script: a context manager that writes the local files and carries the numbers to W&B.

    folder: where everything of the run goes, W&B's files included; made if missing.
    name, group, job_type: run name, sweep, and script.
    config: the resolved config, see `plain`.
    mode, project, entity: see WandbConfig; "offline" (no account needed), "online", or "disabled" (local files only).
    resume_step: None starts afresh. A number continues the run from the checkpoint of that step: later lines of
        `metrics.jsonl` are cut off, since they will be logged again, and the W&B run keeps its id.
    Raises ValueError for an unknown mode and TypeError for a config that is not plain.
    """

    def __init__(
        self,
        folder: Path,
        *,
        name: str,
        group: str,
        job_type: str,
        config: dict,
        mode: str = "offline",
        project: str = PROJECT,
        entity: str | None = None,
        resume_step: int | None = None,
    ):
        if mode not in MODES:
            raise ValueError(f"W&B mode {mode!r} does not exist; allowed are {', '.join(MODES)}")
        config = filterable(config)
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._summary: dict = {}
        (self.folder / "summary.json").unlink(missing_ok=True)  # it says "finished", which from here on is not true

        metrics = self.folder / "metrics.jsonl"
        write_atomically(metrics, b"" if resume_step is None else _lines_up_to(metrics, resume_step))
        self._metrics = metrics.open("a", encoding="utf-8")

        id_file = self.folder / "wandb_id.txt"
        if resume_step is None or not id_file.exists():
            write_atomically(id_file, secrets.token_hex(4).encode())
        self._wandb = None
        if mode != "disabled":
            settings = {
                "project": project,
                "entity": entity,
                "id": id_file.read_text(),
                "resume": "allow",
                "dir": str(self.folder.resolve()),  # the service may have been started elsewhere
            }
            labels = {"name": name, "group": group, "job_type": job_type}
            self._start_wandb(mode, {**settings, **labels, "config": {**config, "provenance": provenance()}})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        self._metrics.close()
        if kind is None:
            write_atomically(self.folder / "summary.json", _json(self._summary).encode())
        # A failed job must close its W&B run: the next job of this process would otherwise log into it
        self._to_wandb(lambda run: run.finish(exit_code=0 if kind is None else 1), seconds=FINISH_SECONDS + 10)
        self._wandb = None

    def log(self, metrics: dict, step: int) -> None:
        """Append one line of numbers at iteration `step` to `metrics.jsonl`, and send the same to W&B.

        The line is on the disk when this returns. NaN and infinity are kept: a run that diverged should show it.
        """
        metrics = plain(metrics, "metrics")
        self._metrics.write(_json({"step": step, **metrics}) + "\n")
        self._metrics.flush()
        os.fsync(self._metrics.fileno())
        self._to_wandb(lambda run: run.log(metrics, step=step))

    def summary(self, values: dict) -> None:
        """Merge `values` into the summary. `summary.json` is written when the run finishes, and only then."""
        values = plain(values, "summary")
        self._summary.update(values)
        self._to_wandb(lambda run: run.summary.update(values))

    def text(self, key: str, text: str) -> None:
        """Keep a text, such as a sample: in `<key>.txt`, the last one, and in W&B, all of them."""
        (self.folder / f"{key.replace('/', '_')}.txt").write_text(text, encoding="utf-8")
        # commit=False: a text belongs to the step before it and must not count up W&B's step
        page = f"<pre>{html.escape(text)}</pre>"
        self._to_wandb(lambda run: run.log({key: _wandb().Html(page, inject=False)}, commit=False))

    def image(self, key: str, path: Path) -> None:
        """Show the image file at `path` in W&B."""
        self._to_wandb(lambda run: run.log({key: _wandb().Image(str(path))}, commit=False))

    def _start_wandb(self, mode: str, arguments: dict) -> None:
        reason = ""
        if mode == "online":
            # asked here, since wandb.init would prompt for a key on a terminal and raise without one
            account, error = _attempt(logged_in, CALL_SECONDS)
            if not account:
                mode, reason = "offline", _one_line(error) if error else "no account is logged in (`wandb login`)"
        self._wandb, error = _attempt(lambda: _init(mode, arguments), START_SECONDS + 20)
        if error and mode == "online":
            _attempt(_teardown, 5)
            mode, reason = "offline", _one_line(error)
            self._wandb, error = _attempt(lambda: _init(mode, arguments), START_SECONDS + 20)
        if error:
            self._drop_wandb(error)
        elif reason:
            _say(f"W&B: {reason}; the run is kept offline in {self.folder}, `make sync` uploads it")
        elif mode == "online":
            _say(f"W&B: {self._wandb.url}")

    def _to_wandb(self, call: Callable, seconds: float | None = None) -> None:
        if self._wandb is not None:
            run = self._wandb
            _, error = _attempt(lambda: call(run), seconds or CALL_SECONDS)
            if error:
                self._drop_wandb(error)

    def _drop_wandb(self, error: BaseException) -> None:
        self._wandb = None
        where = self.folder / "metrics.jsonl"
        _say(f"W&B is off for the rest of this run ({_one_line(error)}); the metrics go on into {where}")
        _attempt(_teardown, 5)


def _wandb():
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # offline means nothing is sent, crash reports included
    import wandb  # here: 0.7 s that the disabled mode need not pay, and it may be missing

    return wandb


def logged_in() -> bool:
    """Say whether a W&B key is configured. Never prompts, prints nothing, needs no network."""
    wandb = _wandb()
    wandb.setup(wandb.Settings(silent=True))  # login says where it found the key, twice
    return wandb.login(prompt=False, verify=False)


def _init(mode: str, arguments: dict):
    wandb = _wandb()
    settings = wandb.Settings(
        silent=True,  # our own line is the only one
        console="off",  # our prints are our own; W&B would wrap stdout
        init_timeout=START_SECONDS,
        x_service_wait=START_SECONDS,
        finish_timeout=FINISH_SECONDS,
        x_transaction_log_flush_interval=1,  # s; 15 by default, all of it lost when the run is killed
        # the machine, the commit and the versions are in provenance.json; collecting them again takes a second
        x_disable_meta=True,
        x_disable_stats=True,
        x_disable_machine_info=True,
        x_save_requirements=False,
        disable_git=True,
        disable_code=True,
        save_code=False,
    )
    # create_new: a run is the business of its Run object alone, never of wandb's global one
    run = wandb.init(mode=mode, settings=settings, reinit="create_new", **arguments)
    run.define_metric("val/loss", summary="min")
    return run


def _teardown() -> None:
    """End a broken W&B service: the next job starts a new one, and the process does not wait for it at its end."""
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()


def _attempt(call: Callable, seconds: float) -> tuple[object, BaseException | None]:
    """Return (result, None) or (None, error): whatever goes wrong, and TimeoutError when there is no answer in time.

    In a thread, since a service that is stopped blocks its caller for ever, in a log as in a finish.
    """
    result, errors = [], []

    def work():
        try:
            result.append(call())
        except BaseException as error:  # noqa: BLE001 - not only wandb.errors: a dead service is a ConnectionResetError
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if result:
        return result[0], None
    return None, errors[0] if errors else TimeoutError(f"no answer in {seconds:.0f} s")


def _lines_up_to(path: Path, step: int) -> bytes:
    """The lines of a metrics file up to and with `step`, byte for byte. A half-written last line is left out."""
    kept = []
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
        row = read_line(line)
        if row is not None and row["step"] <= step:
            kept.append(line)
    return b"".join(kept)


def read_line(line: bytes | str) -> dict | None:
    """Read one line of a metrics file; None for a line cut short, which is what a kill in mid-write leaves."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and "step" in row else None


def write_atomically(path: Path, content: bytes) -> None:
    """Write to a temporary name, fsync, rename: the file before survives until then."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _json(value: dict) -> str:
    return json.dumps(value, ensure_ascii=False)


def _one_line(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}".split("\n")[0]
    return text[:200]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
