"""
What a run leaves on disk: its folder runs/<sweep>/<name>/, and checkpoints, which are written whole or not at all.
"""

import hashlib
import json
import os
import re
from dataclasses import asdict, fields
from pathlib import Path

import torch
import yaml

from cli import InputError, nearest, strict
from model import GPT, GPTConfig
from tracking import provenance, write_atomically

RUNS = Path("runs")
CHECKPOINTS = Path("checkpoints")


# ---------------------------------------------------------------------------------------------------------------------
# checkpoints


def save_checkpoint(path, checkpoint):
    """Write tensors and plain types to a temporary name, fsync, rename: the file before survives until then."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as f:
            torch.save(checkpoint, f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def find_checkpoint(ckpt):
    """
    `ckpt=` as a path: of a file or a Hugging Face folder, as given or as a bare name looked up in checkpoints/; what is
    neither, and can be the name of a model on the Hub, is looked for there.
    """
    for path in (Path(ckpt), CHECKPOINTS / ckpt):
        if path.is_file() or (path / "config.json").is_file():
            return path
    files = [p.name for p in CHECKPOINTS.glob("*.pt") if p.is_file() and ".calibration" not in p.suffixes]
    files = sorted(files + [p.parent.name for p in CHECKPOINTS.glob("*/config.json")])
    have = f"{', '.join(files)}{nearest(ckpt, files)}" if files else "nothing yet, `make sweep` fills it"
    wrong = f"ckpt={ckpt}: no such file, nor a Hugging Face folder, here or in {CHECKPOINTS}/ ({have})"
    if Path(ckpt).is_dir():
        wrong = (
            f"ckpt={ckpt}: the folder has no config.json, so it is no Hugging Face folder; of a run of ours give its last.pt"
        )
    if Path(ckpt).exists() or not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", ckpt) or ckpt.endswith(".pt"):
        raise InputError(wrong)
    try:
        return from_hub(ckpt)
    except InputError as error:
        raise InputError(f"{wrong}; {error}") from None


def from_hub(name):
    """The folder of a model on the Hugging Face Hub: from its local cache, else downloaded. InputError when neither works."""
    from huggingface_hub import snapshot_download  # here: it takes a while, and local paths never need it

    from huggingface import HUB_FILES, weight_files

    why = "not all of its files are there"
    for local in (True, False):
        try:
            folder = Path(snapshot_download(name, allow_patterns=HUB_FILES, local_files_only=local))
            if (folder / "config.json").is_file() and all(path.is_file() for path in weight_files(folder)):
                return folder
        except Exception as error:  # of the network, of the Hub, of a cache that is damaged: many kinds
            why = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
    raise InputError(f"nor does the Hugging Face Hub or its local cache give it ({why})")


def checkpoints_of(ckpt=None, sweep=None):
    """
    The paths behind `ckpt=` (one checkpoint) or `sweep=` (all finished training runs of runs/<sweep>/, seed by seed, so that
    the n_kv's are interleaved).
    """
    if (ckpt is None) == (sweep is None):
        raise InputError("give either ckpt=… (one checkpoint) or sweep=… (all finished runs of runs/<sweep>/)")
    if ckpt is not None:
        return [find_checkpoint(ckpt)]
    runs = []
    for path in RUNS.glob(f"{sweep}/*/summary.json"):  # written last: these runs are finished
        config = yaml.safe_load((path.parent / "config.yaml").read_text())
        if config["script"] == "train":
            runs.append((config["seed"], -config["model"]["n_kv"], path.parent / "last.pt"))
    if not runs:
        raise InputError(f"sweep={sweep}: no finished training run in {RUNS / sweep}/")
    return [path for _, _, path in sorted(runs)]


def load_checkpoint(path, device="cpu"):
    """
    A checkpoint's dict, weights without compile or DDP prefixes, of a file of ours or a Hugging Face folder. InputError for
    what is neither.
    """
    if Path(path).is_dir():
        from huggingface import checkpoint_from  # here: a notebook that reads our own files needs no tokenizers

        checkpoint = checkpoint_from(path)
        checkpoint["model"] = {name: p.to(device) for name, p in checkpoint["model"].items()}
        return checkpoint
    try:
        checkpoint = torch.load(path, map_location=device, weights_only=True)  # runs no code from the file
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if reason.startswith("Weights only load failed"):  # torch's advice is to switch the safety off
            reason = "it is none, or holds more than tensors and plain values"
        raise InputError(f"{path} cannot be read as a checkpoint: {reason}") from None
    needed = {"model", "model_config", "iteration", "tokenizer", "data", "config", "seed"}
    if not isinstance(checkpoint, dict) or needed - checkpoint.keys():
        raise InputError(f"{path} is no checkpoint of train.py or uptrain.py (their keys: {', '.join(sorted(needed))})")
    # DDP and compile name the module they wrap; our own files hold the bare one
    checkpoint["model"] = {re.sub(r"^((module|_orig_mod)\.)+", "", name): p for name, p in checkpoint["model"].items()}
    return checkpoint


def load_model(checkpoint, device="cpu"):
    """The GPT of a checkpoint's dict. InputError when config and weights disagree."""
    model = GPT(strict(GPTConfig, checkpoint["model_config"], "model"))
    try:
        model.load_state_dict(checkpoint["model"])
    except RuntimeError as error:
        raise InputError(f"the checkpoint's weights do not fit its config: {str(error).splitlines()[-1].strip()}") from None
    return model.to(device)


def calibration_path(path):
    """Where the calibration of the checkpoint at `path` lies: beside the file itself, also when `path` is a link to it, or
    in its folder."""
    path = Path(path).resolve()
    return path / "calibration.pt" if path.is_dir() else path.with_suffix(".calibration.pt")


def digest(model):
    """The sha256 of a model's weights and shape: what a calibration is tied to."""
    # fields that came after the first calibrations count where they are set, so that those stay valid
    shape = ", ".join(f"{name}={value!r}" for name, value in asdict(model.config).items() if value is not None)
    sha = hashlib.sha256(f"GPTConfig({shape})".encode())
    for name, p in sorted(model.state_dict().items()):
        sha.update(name.encode() + p.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def load_calibration(path, model, config):
    """The calibration of the checkpoint at `path`, if the cache's `config` needs one; InputError when it is not there."""
    if not config.calibrated:
        return None
    file = calibration_path(path)
    make = f"make it with: python calibrate.py ckpt={path}"
    if not file.exists():
        raise InputError(f"this cache needs {file}, which is not there; {make}")
    try:
        calibration = torch.load(file, map_location=model.wte.weight.device, weights_only=True)
        weights = calibration["weights"]
    except Exception as error:
        raise InputError(f"{file} cannot be read as a calibration ({type(error).__name__}); {make} again=true") from None
    if weights != digest(model):
        raise InputError(f"{file} was made from other weights than {path} has; {make} again=true")
    return calibration


# ---------------------------------------------------------------------------------------------------------------------
# run folders


def open_run(config):
    """
    The folder runs/<sweep>/<name> of a run's plain config, and its state: 'new', 'interrupted' or 'finished'.
    InputError when the folder was made with another config: nothing is ever trained into a folder it does not belong to.
    """
    for key in ("sweep", "name"):
        if not config[key] or set(config[key]) & set("/\\= \t\n") or config[key].startswith("."):
            raise InputError(f"{key}={config[key]!r} cannot name a folder: letters, digits, -, _ and . only")
    folder = RUNS / config["sweep"] / config["name"]
    path = folder / "config.yaml"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "provenance.json", json.dumps(provenance(), indent=2).encode())
        write_atomically(path, yaml.safe_dump(config, sort_keys=False).encode())
        return folder, "new"

    def flat(config, prefix=""):
        for key, value in config.items():
            if isinstance(value, dict):
                yield from flat(value, f"{prefix}{key}.")
            else:
                yield prefix + key, value

    # a folder from before the model had a field counts as having its default
    fresh = {f"model.{f.name}": f.default for f in fields(GPTConfig)}
    old, new = ({**fresh, **dict(flat(c))} for c in (yaml.safe_load(path.read_text(encoding="utf-8")), config))
    changed = [k for k in sorted({*old, *new} - {"data.origin"}) if old.get(k) != new.get(k)]  # one text, found elsewhere
    if changed:
        what = ", ".join(f"{k}={old.get(k)} (now {new.get(k)})" for k in changed[:4])
        raise InputError(
            f"{folder} holds another run: {what}. Give this one a place of its own (sweep=…), or delete that folder"
        )
    if (folder / "summary.json").exists():
        return folder, "finished"
    return folder, "interrupted" if (folder / "last.pt").exists() else "new"
